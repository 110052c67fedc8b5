"""The engine hop's work: every request bounded by its deadline, with a span for each of its phases.

Knows the engine only by its protocol; knows nothing of Ray.
"""

import asyncio
import time
from contextlib import aclosing

from serve_app.aio import Enough, Sink, within
from serve_app.engine.protocol import Engine
from serve_app.errors import InternalError, RequestError
from serve_app.messages import EngineDelta, EngineRequest, EngineTimes, LoadReport
from serve_app.telemetry.logs import bind
from serve_app.telemetry.stages import engine_stages, times_with
from serve_app.telemetry.tracing import Tracing


class EngineService:
    """One instance serves many requests at once; `in_flight` is how many now."""

    def __init__(self, engine: Engine, tracing: Tracing) -> None:
        self._engine = engine
        self._tracing = tracing
        self.in_flight = 0

    async def generate(self, request: EngineRequest, sink: Sink[EngineDelta]) -> None:
        """Gives `sink` what the engine produces; returns after the last delta, which has a finish reason.

        Cancelling it aborts the request in the engine. Raises what `Engine.generate` does, and DeadlineExceeded.
        """
        bind(request.context.request_id, request.context.trace_id)
        phases = _Phases(request)
        self.in_flight += 1
        try:
            await within(request.context.deadline_s, self._drain(request, phases, sink))
        except (asyncio.CancelledError, Enough):
            phases.cancelled = not phases.whole  # no error: a stop string ends a request this way too
            raise
        except RequestError as error:
            phases.error, phases.failed = error.code, error.status >= 500
            raise
        except Exception:
            phases.error, phases.failed = InternalError.code, True
            raise
        finally:
            self.in_flight -= 1
            phases.describe(self._tracing)

    async def _drain(self, request: EngineRequest, phases: "_Phases", sink: Sink[EngineDelta]) -> None:
        async with aclosing(self._engine.generate(request)) as deltas:
            async for delta in deltas:
                phases.see(delta)
                sink(delta)

    async def load(self) -> LoadReport:
        """See `Engine.load`."""
        return await self._engine.load()


class _Phases:
    """What is known of one request's phases."""

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self._times: EngineTimes | None = None
        self._last_delta_s: float | None = None
        self._tokens = 0
        self.whole = False
        self.cancelled = False
        self.error: str | None = None
        self.failed = False

    def see(self, delta: EngineDelta) -> None:
        self._times = times_with(delta, self._times)
        self._last_delta_s = time.time()
        self._tokens += len(delta.token_ids)
        self.whole = delta.finish_reason is not None

    def describe(self, tracing: Tracing) -> None:
        """The spans, children of the postprocessor's. The phase in which the request ended has its error."""
        context = self._request.context
        if not tracing.records(context.traceparent):
            return
        # What failed was in its last phase until then, also where that gave nothing for long.
        ended_s = self._last_delta_s if self.error is None else None
        stages = engine_stages(context, self._times, ended_s or time.time())
        shared = {"tokenline.engine_request_id": self._request.engine_request_id}
        *before, last = stages
        for one in before:
            tracing.stage(context.traceparent, one, shared)
        ending = {"tokenline.tokens": self._tokens, "tokenline.cancelled": self.cancelled}
        tracing.stage(context.traceparent, last, shared | ending, error=self.error, failed=self.failed)
