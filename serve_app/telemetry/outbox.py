"""Requests that have ended and were not yet reported: bounded, oldest dropped first and counted. No asyncio, no Ray."""

from collections import deque
from collections.abc import Sequence

from serve_app.messages import RequestMetrics

_MAX_REQUESTS = 10_000


class Outbox:
    """`add` is on the path of a request and costs an append."""

    def __init__(self, max_requests: int = _MAX_REQUESTS) -> None:
        self._waiting: deque[RequestMetrics] = deque()
        self._max_requests = max_requests
        self.dropped = 0

    def add(self, request: RequestMetrics) -> None:
        """One more request that has ended."""
        self._waiting.append(request)
        self._trim()

    def take(self) -> tuple[RequestMetrics, ...]:
        """All of them, oldest first; they are the caller's now."""
        taken = tuple(self._waiting)
        self._waiting.clear()
        return taken

    def put_back(self, requests: Sequence[RequestMetrics]) -> None:
        """What could not be delivered; it goes ahead of what has come since."""
        self._waiting.extendleft(reversed(requests))
        self._trim()

    def _trim(self) -> None:
        while len(self._waiting) > self._max_requests:
            self._waiting.popleft()
            self.dropped += 1
