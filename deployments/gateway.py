"""The gateway's replica: runs the library's HTTP application over handles to the other hops."""

import asyncio
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from deployments.handles import PostprocessHandle, TokenizerHandle
from serve_app.config import AppConfig
from serve_app.gateway.readiness import Readiness
from serve_app.gateway.server import build_asgi
from serve_app.path import Hops


class GatewayDeployment:
    """Authenticates, validates, writes JSON or SSE (`serve_app/gateway/`)."""

    def __init__(self, config: AppConfig, tokenizer: DeploymentHandle[Any], postprocess: DeploymentHandle[Any]) -> None:
        hops = Hops(TokenizerHandle(tokenizer), PostprocessHandle(postprocess))
        readiness = Readiness(config, hops)
        self._asgi = build_asgi(config, hops, readiness)
        self._warm_up = asyncio.get_event_loop().create_task(readiness.warm_up())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray Serve's hook for an application that only a replica can build, since it needs the handles."""
        return self._asgi
