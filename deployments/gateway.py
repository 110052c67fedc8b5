"""The gateway's replica: runs the library's HTTP application over handles to the other hops."""

import asyncio
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.handles import PostprocessHandle, TokenizerHandle
from deployments.replica import ReplicaTelemetry
from serve_app.config import AppConfig
from serve_app.delays import slow_writes
from serve_app.gateway.observe import Telemetry
from serve_app.gateway.readiness import Readiness
from serve_app.gateway.server import Gateway
from serve_app.messages import HopReport
from serve_app.path import Hops


class GatewayDeployment:
    """Authenticates, validates, writes JSON or SSE (`serve_app/gateway/`)."""

    def __init__(
        self,
        config: AppConfig,
        tokenizer: DeploymentHandle[Any],
        postprocess: DeploymentHandle[Any],
        insight: DeploymentHandle[Any],
    ) -> None:
        self._telemetry = ReplicaTelemetry(config, "gateway", insight)
        self._postprocess = PostprocessHandle(postprocess, config.channel)
        hops = Hops(TokenizerHandle(tokenizer), self._postprocess, config.channel.max_backlog_items)
        readiness = Readiness(config, hops)
        telemetry = Telemetry(self._telemetry.tracing, self._telemetry.outbox, self._telemetry.insight)
        self._gateway = Gateway(config, hops, readiness, telemetry)
        self._asgi = slow_writes(self._gateway, config.delays)
        self._telemetry.begin(self._report)
        self._warm_up = asyncio.get_event_loop().create_task(readiness.warm_up())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray Serve's hook for an application that only a replica can build, since it needs the handles."""
        return one_request_id(self._asgi)

    async def _report(self) -> HopReport:
        return self._telemetry.report(self._gateway.in_flight, queued=0)

    async def __del__(self) -> None:
        """Ray Serve awaits this when the replica is shut down."""
        self._postprocess.stop()
        await self._telemetry.end()


def one_request_id(app: ASGIApp) -> ASGIApp:
    """Keeps the response's `x-request-id` to the one our application chose.

    Around every application Ray Serve 2.60 appends the request's own `x-request-id` to the response, unchecked
    (`RequestIdMiddleware` in `ray/serve/_private/http_util.py`); no option turns that off.
    """

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_sealed(message: Message) -> None:
            await send(_SealedStart(message) if message["type"] == "http.response.start" else message)

        await app(scope, receive, send_sealed)

    return wrapped


class _SealedStart(dict[str, Any]):
    """A message whose headers stay as they were: who replaces the list and goes on appending appends to a copy."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, list(value) if key == "headers" else value)
