"""What every replica has beside its work: JSON log lines, a tracer, and a report of itself once a second."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.handles import InsightHandle
from deployments.meter import RayMeter
from serve_app.config import AppConfig
from serve_app.insight.reporting import Reporting
from serve_app.messages import GpuReport, HopReport, LoadReport
from serve_app.telemetry import logs, tracing
from serve_app.telemetry.outbox import Outbox

# Within Ray Serve's time for a replica's end.
_FLUSH_S = 2.0


class ReplicaTelemetry:
    """One per replica, made first. `begin` starts the reports, `end` sends what is still here."""

    def __init__(self, config: AppConfig, hop: str, insight: DeploymentHandle[Any]) -> None:
        self._hop = hop
        self._model = config.model.name
        self._replica = serve.get_replica_context().replica_id.unique_id
        logs.set_up(hop, self._replica)
        self.tracing = tracing.start(config.tracing, hop, self._replica, config.model.name)
        self.outbox = Outbox()
        self.insight = InsightHandle(insight)
        self._meter = RayMeter()
        self._reporting: Reporting | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, sample: Callable[[], Awaitable[HopReport]]) -> None:
        """From now on once a second."""
        self._reporting = Reporting(sample, self.outbox, self._model, self._meter, self.insight)
        self._task = asyncio.get_event_loop().create_task(self._reporting.run())

    def report(
        self, in_flight: int, queued: int, load: LoadReport | None = None, gpus: tuple[GpuReport, ...] = ()
    ) -> HopReport:
        """This replica now."""
        return HopReport(
            hop=self._hop,
            replica=self._replica,
            reported_s=time.time(),
            in_flight=in_flight,
            queued=queued,
            exported_spans=self.tracing.exported_spans,
            dropped_spans=self.tracing.dropped_spans,
            load=load,
            gpus=gpus,
        )

    async def end(self) -> None:
        """The last report and the last spans, within a few seconds."""
        if self._task is not None:
            self._task.cancel()
        if self._reporting is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_S):
                    await self._reporting.once()
        await asyncio.to_thread(self.tracing.shutdown, _FLUSH_S)
