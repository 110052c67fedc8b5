"""The postprocessor's replica: calls the engine and turns its token ids into response bytes."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.handles import GENERATED, EngineHandle
from deployments.replica import ReplicaTelemetry
from deployments.streams import Answering
from serve_app.channel.route import Route
from serve_app.config import AppConfig
from serve_app.delays import choice_type
from serve_app.messages import Closing, GenerateRequest, HopReport, PathReport
from serve_app.postprocess.service import PostprocessService
from serve_app.vocabulary import Vocabulary, load_tokenizer


class PostprocessDeployment:
    """See `serve_app/postprocess/`."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, config: AppConfig, engine: DeploymentHandle[Any], insight: DeploymentHandle[Any]
    ) -> None:
        self._telemetry = ReplicaTelemetry(config, "postprocess", insight)
        vocabulary = Vocabulary(load_tokenizer(config.model))
        self._engine = EngineHandle(engine, config.channel)
        self._service = PostprocessService(
            vocabulary,
            self._engine,
            self._telemetry.tracing,
            coalesce_tokens=config.postprocess.stream_coalesce_tokens,
            choice_type=choice_type(config.delays),
        )
        self._answering: Answering[GenerateRequest, bytes | Closing] = Answering(
            self._service.generate, GENERATED, config.channel
        )
        self._telemetry.begin(self._report)

    async def generate(self, request: GenerateRequest, route: Route) -> None:
        await self._answering.generate(request, route)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[bytes | Closing, None]:
        async with aclosing(self._answering.stream(request)) as items:
            async for item in items:
                yield item

    async def report(self) -> PathReport:
        return await self._service.report()

    async def _report(self) -> HopReport:
        return self._telemetry.report(self._service.in_flight, queued=0)

    async def __del__(self) -> None:
        """Ray Serve awaits this when the replica is shut down."""
        await self._answering.stop()
        self._engine.stop()
        await self._telemetry.end()
