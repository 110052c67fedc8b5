"""What the gateway measures of one request while it runs, and what the hops behind it said of it.

One per HTTP request, from its arrival to its last byte (`observe.py`). No HTTP and no spans here.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from serve_app.errors import ModelNotFound, RequestError
from serve_app.gateway.inbound import Inbound
from serve_app.messages import GenerateSummary, Operation, RequestMetrics, Stage
from serve_app.telemetry.account import Account, account
from serve_app.telemetry.names import DISCONNECTED, WRITE, outcome_of
from serve_app.telemetry.stages import Work, aligned, stage

# nginx's status for a client that left before its answer; no client ever sees it.
CLIENT_LEFT = 499


class Recording:
    """`whole` once the last byte of an answer was written: what its client does then is no concern of the request's."""

    def __init__(self, request_id: str, operation: Operation, model: str, arrived_s: float) -> None:
        self.request_id = request_id
        self.operation = operation
        self.arrived_s = arrived_s
        self.inbound: Inbound | None = None
        self.include_timings = False
        self.status = 0  # of the response that was begun; 0 before that
        self.whole = False
        self.error: RequestError | None = None
        self._model = model
        self._left = False
        self._stages: list[Stage] = []
        self._writing = Work(WRITE)
        self._first_write_s: float | None = None
        self._last_write_s: float | None = None
        self._summary: GenerateSummary | None = None

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """A stage of the gateway's own, also where it fails."""
        begin_s = time.time()
        try:
            yield
        finally:
            self._stages.append(stage(name, begin_s))

    def hop_answered(self, stages: tuple[Stage, ...], sent_s: float) -> None:
        """A hop's stages, which was called at `sent_s` and has answered now."""
        self._stages.extend(aligned(stages, sent_s, time.time()))

    def summarise(self, summary: GenerateSummary, sent_s: float) -> None:
        """What the hops behind say at the end of a generation."""
        self.hop_answered(summary.stages, sent_s)
        self._summary = summary

    def wrote(self, begin_s: float, end_s: float) -> None:
        """A piece of the response's body went to the socket."""
        self._writing.add(begin_s, end_s)
        if self._first_write_s is None and self.status == 200:
            self._first_write_s = end_s
        self._last_write_s = end_s

    def fail(self, error: RequestError) -> None:
        """What the client is told, or would be; what goes wrong once it has all of its answer, or has gone, is not."""
        if not self.whole and not self._left:
            self.error = self.error or error

    def leave(self) -> None:
        """The client has gone."""
        self._left = not self.whole

    def metrics(self, trace_id: str | None = None, sampled: bool = False) -> RequestMetrics:
        """Everything so far; at the end of the request, all of it."""
        status, error = self._ending()
        summary = self._summary
        stream = self.inbound is not None and self.inbound.stream
        return RequestMetrics(
            request_id=self.request_id,
            operation=self.operation,
            model="" if isinstance(self.error, ModelNotFound) else self._model,
            stream=stream,
            arrived_s=self.arrived_s,
            ended_s=self._last_write_s if self.whole and self._last_write_s is not None else time.time(),
            status=status,
            outcome=outcome_of(status, error),
            error=error,
            trace_id=trace_id,
            sampled=sampled,
            first_write_s=self._first_write_s,
            stages=(*self._stages, *self._writing.stages()),
            choices=() if summary is None else summary.choices,
            prompt_tokens=None if summary is None else summary.prompt_tokens,
            completion_tokens=None if summary is None else summary.completion_tokens,
            cached_tokens=None if summary is None else summary.cached_tokens,
        )

    def timings(self, trace_id: str | None) -> dict[str, Any]:
        """For the client who asked: milliseconds until now, null where unknown."""
        metrics = self.metrics()
        numbers = account(metrics)
        return {
            "ttft_ms": _ms(numbers.ttft_s),
            "tpot_ms": _ms(numbers.tpot_s),
            "longest_gap_ms": _ms(numbers.longest_gap_s),
            "e2e_ms": _ms(numbers.e2e_s),
            "parts_ms": {name: _ms(seconds) for name, seconds in numbers.parts.items()},
            "stages": [
                {
                    "name": one.name,
                    "begin_ms": _ms(one.begin_s - self.arrived_s),
                    "busy_ms": _ms(one.busy_s),
                    "longest_ms": _ms(one.longest_s),
                    "count": one.count,
                }
                for one in metrics.stages
            ],
            "prompt_tokens": metrics.prompt_tokens,
            "completion_tokens": metrics.completion_tokens,
            "cached_tokens": metrics.cached_tokens,
            "trace_id": trace_id,
        }

    def server_timing(self) -> str:
        """The `Server-Timing` header: each part and the total, in milliseconds."""
        numbers: Account = account(self.metrics())
        entries = [*numbers.parts.items(), ("total", numbers.e2e_s)]
        return ", ".join(f"{name};dur={1000 * seconds:.3f}" for name, seconds in entries)

    def _ending(self) -> tuple[int, str | None]:
        """Status and error code as metrics have them."""
        if self.error is not None:
            return self.error.status, self.error.code
        if self._left or not self.status:
            return CLIENT_LEFT, DISCONNECTED
        return self.status, None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
