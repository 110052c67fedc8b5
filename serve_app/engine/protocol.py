"""The engine seam: what an engine must do, whatever runs inside it.

Two implementations obey it: `vllm_engine.py`, the real one, and `sim_engine.py`, for rates and faults.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from serve_app.messages import EngineDelta, EngineRequest, LoadReport


class Engine(Protocol):
    """One engine in one replica."""

    async def start(self) -> None:
        """Loads the model; returns when requests can be served. Raises ConfigError for what cannot work."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """Streams what the engine produces; the last delta has a finish reason.

        Closing the generator aborts the request and frees its KV blocks. Raises InvalidRequest for a request the engine
        refuses, Overloaded when its queue is full, EngineDied when it is lost.
        """

    async def load(self) -> LoadReport:
        """Load now. Raises EngineDied when the engine is dead, which makes it the health check too."""

    async def stop(self) -> None:
        """Ends the engine and its processes. May be called twice."""
