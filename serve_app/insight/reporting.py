"""Once a second, off the path of any request: what a replica says of itself goes to the metrics and to the insight.

Nothing here can fail a request or hold one up. What the insight cannot take now waits, bounded, for the next second.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from serve_app.insight.service import InsightClient
from serve_app.messages import HopReport
from serve_app.telemetry.metrics import Meter, of_report, of_request
from serve_app.telemetry.outbox import Outbox

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
# A replica that has nothing new to say is still there.
_HEARTBEAT_S = 10.0
_PUSH_TIMEOUT_S = 5.0


class Reporting:
    """`sample` gives the replica's report without its requests, which come from `outbox` and are for `model`."""

    def __init__(
        self,
        sample: Callable[[], Awaitable[HopReport]],
        outbox: Outbox,
        model: str,
        meter: Meter,
        insight: InsightClient,
    ) -> None:
        self._model = model
        self._sample = sample
        self._outbox = outbox
        self._meter = meter
        self._insight = insight
        self._unsent = Outbox()
        self._metered: HopReport | None = None
        self._pushed: HopReport | None = None
        self._failing = False

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            await self.once()

    async def once(self) -> None:
        """One report. Never raises: a replica works on whether or not anybody hears of it."""
        try:
            await self._report()
        except Exception:
            if not self._failing:
                logger.warning("this replica's report failed; the next ones are tried in silence", exc_info=True)
            self._failing = True
        else:
            self._failing = False

    async def _report(self) -> None:
        requests = self._outbox.take()
        for request in requests:
            self._unsent.add(request)
        # In one go: labels that many requests share are summed before Ray sees them.
        self._meter.record([one for request in requests for one in of_request(request, self._model)])
        dropped = self._outbox.dropped + self._unsent.dropped
        report = msgspec.structs.replace(await self._sample(), dropped_requests=dropped)
        self._meter.record(of_report(report, self._metered))
        self._metered = report
        await self._push(report)

    async def _push(self, report: HopReport) -> None:
        requests = self._unsent.take()
        if not requests and not self._is_news(report):
            return
        try:
            async with asyncio.timeout(_PUSH_TIMEOUT_S):
                await self._insight.report(msgspec.structs.replace(report, requests=requests))
        except BaseException:
            self._unsent.put_back(requests)
            raise
        self._pushed = report

    def _is_news(self, report: HopReport) -> bool:
        before = self._pushed
        # A clock that was set back must not silence the heartbeat.
        if before is None or not 0 <= report.reported_s - before.reported_s < _HEARTBEAT_S:
            return True
        return msgspec.structs.replace(report, reported_s=before.reported_s) != before
