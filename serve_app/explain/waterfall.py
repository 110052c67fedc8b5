"""One request, stage by stage: when each began, what it took of the wait, and where its pieces lie. Pure."""

from dataclasses import dataclass

from serve_app.messages import RequestMetrics, Stage
from serve_app.telemetry.measured import Measured, largest, shares
from serve_app.telemetry.names import STAGES, UNACCOUNTED

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Row:
    """A stage, or `unaccounted`.

    begins_s: seconds from the request's arrival; None where its place is not known.
    took_s: its part of the wait; the parts of all rows add up to E2E.
    share: of the wait; None if there was none.
    spans: from when to when it lies, in seconds from the arrival, and `busy` where it was at work in them.
    """

    stage: str
    begins_s: float | None
    took_s: float
    share: float | None
    spans: tuple[Span, ...]
    busy: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Everything measured of one request; seconds, None is unknown."""

    request_id: str
    trace_id: str | None
    operation: str
    model: str
    stream: bool
    length: str
    arrived_s: float
    outcome: str
    status: int
    error: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    rows: tuple[Row, ...]
    dominant: str | None


def waterfall(one: Measured) -> Waterfall:
    """The request's rows in the path's order, `unaccounted` last."""
    request, account = one.request, one.account
    found = largest(account.parts)
    return Waterfall(
        request_id=request.request_id,
        trace_id=request.trace_id,
        operation=request.operation,
        model=request.model,
        stream=request.stream,
        length=account.length,
        arrived_s=request.arrived_s,
        outcome=request.outcome,
        status=request.status,
        error=request.error,
        prompt_tokens=request.prompt_tokens,
        completion_tokens=request.completion_tokens,
        cached_tokens=request.cached_tokens,
        ttft_s=account.ttft_s,
        tpot_s=account.tpot_s,
        e2e_s=account.e2e_s,
        rows=_rows(one),
        dominant=None if found is None else found[0],
    )


def _rows(one: Measured) -> tuple[Row, ...]:
    request, parts = one.request, one.account.parts
    of_all = shares(parts)
    rows = []
    for name in STAGES:
        if stages := [stage for stage in request.stages if stage.name == name]:
            share = of_all.get(name, 0.0) if of_all else None
            rows.append(_row(stages, request, parts.get(name, 0.0), share))
    gaps = _gaps([span for row in rows for span in row.busy], one.account.e2e_s)
    begins_s = gaps[0][0] if gaps else None
    return *rows, Row(UNACCOUNTED, begins_s, parts[UNACCOUNTED], of_all.get(UNACCOUNTED), gaps, gaps)


def _row(stages: list[Stage], request: RequestMetrics, took_s: float, share: float | None) -> Row:
    spans = _within([(stage.begin_s, stage.end_s) for stage in stages], request)
    busy = _within([piece for one in stages for piece in one.pieces or ((one.begin_s, one.end_s),)], request)
    return Row(stages[0].name, min(begin_s for begin_s, _ in spans), took_s, share, spans, busy)


def _within(spans: list[Span], request: RequestMetrics) -> tuple[Span, ...]:
    """As seconds from the arrival, cut to the request's wall time."""
    wall_s = max(0.0, request.ended_s - request.arrived_s)

    def offset(moment_s: float) -> float:
        return min(max(0.0, moment_s - request.arrived_s), wall_s)

    return tuple((offset(begin_s), offset(end_s)) for begin_s, end_s in sorted(spans))


def _gaps(busy: list[Span], wall_s: float) -> tuple[Span, ...]:
    """What no span covers between the arrival and `wall_s`."""
    gaps, reached_s = [], 0.0
    for begin_s, end_s in (*sorted(busy), (wall_s, wall_s)):
        if begin_s > reached_s:
            gaps.append((reached_s, begin_s))
        reached_s = max(reached_s, end_s)
    return tuple(gaps)
