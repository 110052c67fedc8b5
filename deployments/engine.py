"""The engine's replica: one engine, every request bounded by its deadline, unhealthy when the engine is dead."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from serve_app.aio import task_count, until
from serve_app.config import AppConfig
from serve_app.engine.protocol import Engine
from serve_app.messages import EngineDelta, EngineRequest, PathReport


class EngineDeployment:
    """See `serve_app/engine/`. `__init__` loads the model, so a replica that has started can serve."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        self._engine = build_engine(config)
        await self._engine.start()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        async with aclosing(until(request.context.deadline_s, self._engine.generate(request))) as deltas:
            async for delta in deltas:
                yield delta

    async def report(self) -> PathReport:
        return PathReport(await self._engine.load(), {}).with_tasks("engine", task_count())

    async def check_health(self) -> None:
        """Ray Serve calls this; an exception has the replica replaced."""
        await self._engine.load()

    async def __del__(self) -> None:
        """Ray Serve awaits this when the replica is shut down."""
        await self._engine.stop()


def build_engine(config: AppConfig) -> Engine:
    """The engine that the configuration asks for. Imports are here so that each kind costs only its own."""
    if config.engine.kind == "sim":
        from serve_app.engine.sim_engine import SimEngine  # noqa: PLC0415
        from serve_app.vocabulary import Vocabulary, load_tokenizer  # noqa: PLC0415

        return SimEngine(config.engine.sim, Vocabulary(load_tokenizer(config.model)).size)
    from serve_app.engine.vllm_engine import VllmEngine  # noqa: PLC0415

    return VllmEngine(config.model, config.engine)
