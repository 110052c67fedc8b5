"""The insight process's work: takes every replica's reports in, answers with what they add up to. No Ray here."""

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from serve_app.config import InsightSection
from serve_app.insight.history import History
from serve_app.insight.view import view
from serve_app.messages import HopReport, RequestMetrics

# A view over 10,000 requests costs some 50 ms: however many pages are open, it is made once in this time.
_VIEW_LASTS_S = 1.0


class InsightClient(Protocol):
    """What the other hops know of the insight. Nothing that serves a request waits for it."""

    async def report(self, report: HopReport) -> None:
        """What one replica says of itself."""

    async def view(self) -> bytes:
        """What the page shows, as JSON (`view.View`)."""

    async def requests(self, last: int | None, request_id: str | None) -> tuple[RequestMetrics, ...]:
        """The `last` requests, or all, newest last; of an id only, if one is given: the request's or its trace's."""


class InsightService:
    """`clock` is the wall's, in seconds."""

    def __init__(self, config: InsightSection, clock: Callable[[], float] = time.time) -> None:
        self._history = History(config)
        self._clock = clock
        self._view = b""
        self._viewed_s: float | None = None

    async def report(self, report: HopReport) -> None:
        """See `InsightClient`."""
        self._history.add(report, self._clock())

    async def view(self) -> bytes:
        """See `InsightClient`; up to a second old."""
        now_s = self._clock()
        # A clock that was set back must not keep an old view alive.
        if self._viewed_s is None or not 0 <= now_s - self._viewed_s < _VIEW_LASTS_S:
            self._view = msgspec.json.encode(view(self._history, now_s))
            self._viewed_s = now_s
        return self._view

    async def requests(self, last: int | None, request_id: str | None) -> tuple[RequestMetrics, ...]:
        """See `InsightClient`."""
        return self._history.requests(last, request_id)
