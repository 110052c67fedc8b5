"""The engine's replica: one engine, unhealthy when that is dead."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.handles import ENGINE_DELTAS
from deployments.replica import ReplicaTelemetry
from deployments.streams import Answering
from serve_app.aio import task_count
from serve_app.channel.route import Route
from serve_app.config import AppConfig
from serve_app.engine.gpu import GpuSampler
from serve_app.engine.protocol import Engine
from serve_app.engine.service import EngineService
from serve_app.messages import EngineDelta, EngineRequest, HopReport, PathReport


class EngineDeployment:
    """See `serve_app/engine/`. `__init__` loads the model, so a replica that has started can serve."""

    async def __init__(self, config: AppConfig, insight: DeploymentHandle[Any]) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        self._telemetry = ReplicaTelemetry(config, "engine", insight)
        self._engine = build_engine(config)
        await self._engine.start()
        self._service = EngineService(self._engine, self._telemetry.tracing)
        self._answering: Answering[EngineRequest, EngineDelta] = Answering(
            self._service.generate, ENGINE_DELTAS, config.channel
        )
        self._gpus = GpuSampler()
        self._telemetry.begin(self._report)

    async def generate(self, request: EngineRequest, route: Route) -> None:
        await self._answering.generate(request, route)

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        async with aclosing(self._answering.stream(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def report(self) -> PathReport:
        return PathReport(await self._engine.load(), {}).with_tasks("engine", task_count())

    async def check_health(self) -> None:
        """Ray Serve calls this; an exception has the replica replaced."""
        await self._engine.load()

    async def _report(self) -> HopReport:
        load = await self._engine.load()
        gpus = await asyncio.to_thread(self._gpus.sample)
        return self._telemetry.report(self._service.in_flight, load.waiting, load, gpus)

    async def __del__(self) -> None:
        """Ray Serve awaits this when the replica is shut down."""
        await self._answering.stop()
        await self._telemetry.end()
        await self._engine.stop()


def build_engine(config: AppConfig) -> Engine:
    """The engine that the configuration asks for. Imports are here so that each kind costs only its own."""
    if config.engine.kind == "sim":
        from serve_app.engine.sim_engine import SimEngine  # noqa: PLC0415
        from serve_app.vocabulary import Vocabulary, load_tokenizer  # noqa: PLC0415

        vocabulary_size = Vocabulary(load_tokenizer(config.model)).size
        return SimEngine(config.engine.sim, vocabulary_size, delays=config.delays)
    from serve_app.engine.vllm_engine import VllmEngine  # noqa: PLC0415

    return VllmEngine(config.model, config.engine, export_metrics=True)
