"""The slowest requests, each with the spans of its waterfall. Pure."""

import heapq
from collections.abc import Sequence

from serve_app.insight.figures import RequestFigures, SpanFigures
from serve_app.insight.history import Entry
from serve_app.messages import Stage
from serve_app.telemetry.names import STAGES

_REQUESTS = 20
# Of each request: `n` choices have three stages each.
_MAX_SPANS = 64


def slowest(entries: Sequence[Entry]) -> list[RequestFigures]:
    """The slowest first, however they ended."""
    return [_request(one) for one in heapq.nlargest(_REQUESTS, entries, key=lambda one: one.account.e2e_s)]


def _request(one: Entry) -> RequestFigures:
    request, account = one.request, one.account
    kept = heapq.nlargest(_MAX_SPANS, request.stages, key=lambda stage: stage.busy_s)
    spans = [_span(stage, request.arrived_s) for stage in kept]
    return RequestFigures(
        request_id=request.request_id,
        trace_id=request.trace_id,
        operation=request.operation,
        model=request.model,
        stream=request.stream,
        outcome=request.outcome,
        status=request.status,
        error=request.error,
        tenant=request.tenant,
        lane=request.lane,
        length=account.length,
        arrived_s=request.arrived_s,
        e2e_s=account.e2e_s,
        ttft_s=account.ttft_s,
        tpot_s=account.tpot_s,
        longest_gap_s=account.longest_gap_s,
        prompt_tokens=request.prompt_tokens,
        completion_tokens=request.completion_tokens,
        cached_tokens=request.cached_tokens,
        choices=len(request.choices),
        parts=account.parts,
        spans=sorted(spans, key=lambda span: (span.begin_s, STAGES.index(span.name))),
        spans_left_out=len(request.stages) - len(kept),
    )


def _span(stage: Stage, arrived_s: float) -> SpanFigures:
    """To the microsecond: a wall clock's double holds no more."""
    return SpanFigures(
        name=stage.name,
        begin_s=round(stage.begin_s - arrived_s, 6),
        duration_s=round(stage.end_s - stage.begin_s, 6),
        busy_s=round(stage.busy_s, 6),
        count=stage.count,
        longest_s=round(stage.longest_s, 6),
        pieces=[(round(begin_s - arrived_s, 6), round(end_s - arrived_s, 6)) for begin_s, end_s in stage.pieces],
    )
