"""Requests that have ended and were not yet reported: bounded, oldest dropped first and counted. No asyncio, no Ray."""

from collections import deque
from collections.abc import Sequence

from serve_app.messages import RequestMetrics

_MAX_REQUESTS = 10_000
# A request has some fifteen stages, one of a hundred choices some hundreds: they are bounded too, not requests alone.
STAGES_PER_REQUEST = 16


class Outbox:
    """`add` is on the path of a request and costs an append."""

    def __init__(self, max_requests: int = _MAX_REQUESTS) -> None:
        self._waiting: deque[RequestMetrics] = deque()
        self._max_requests = max_requests
        self._stages = 0
        self.dropped = 0

    def add(self, request: RequestMetrics) -> None:
        """One more request that has ended."""
        self._waiting.append(request)
        self._stages += len(request.stages)
        self._trim()

    def take(self) -> tuple[RequestMetrics, ...]:
        """All of them, oldest first; they are the caller's now."""
        taken = tuple(self._waiting)
        self._waiting.clear()
        self._stages = 0
        return taken

    def put_back(self, requests: Sequence[RequestMetrics]) -> None:
        """What could not be delivered; it goes ahead of what has come since."""
        self._waiting.extendleft(reversed(requests))
        self._stages += sum(len(request.stages) for request in requests)
        self._trim()

    def _trim(self) -> None:
        most_stages = self._max_requests * STAGES_PER_REQUEST
        while len(self._waiting) > self._max_requests or (self._stages > most_stages and len(self._waiting) > 1):
            self._stages -= len(self._waiting.popleft().stages)
            self.dropped += 1
