"""From the history to what the live page shows. Pure.

Percentiles are those of `percentiles.py` (linear between ranks); a value that is unknown stays out of them, and where
none is known the result is None.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from serve_app.insight.figures import (
    Bucket,
    EngineFigures,
    GpuFigures,
    HopFigures,
    Recent,
    Series,
    StageName,
    TotalFigures,
    View,
)
from serve_app.insight.history import BIN_S, Entry, History, Replica, bin_of
from serve_app.insight.slowest import slowest
from serve_app.messages import HopReport
from serve_app.telemetry.measured import add_up, known, shares
from serve_app.telemetry.names import GATEWAY, LENGTHS, POSTPROCESS, STAGES, TOKENIZER, UNACCOUNTED
from serve_app.telemetry.percentiles import percentiles

# What the gateways will report in a second has happened already.
_REPORTED_AFTER_S = 1.0
_ENGINE = "engine"
_HOPS = (GATEWAY, TOKENIZER, POSTPROCESS, _ENGINE)


def view(history: History, now_s: float) -> View:
    """Everything, as of `now_s`."""
    entries = history.entries(now_s)
    reports = history.replicas(now_s)
    begins_s = _bins(history, now_s)
    grouped: dict[str, list[Entry]] = {length: [] for length in LENGTHS}
    for one in entries:
        grouped[one.account.length].append(one)
    return View(
        now_s=now_s,
        window_s=history.window_s,
        covered_s=now_s - history.complete_from_s(now_s),
        stages=[StageName(name, _hop_of(name)) for name in (*STAGES, UNACCOUNTED)],
        totals=_totals(history),
        recent=_recent(history, entries, reports, now_s),
        everything=_bucket("all", entries),
        buckets=[_bucket(length, grouped[length]) for length in LENGTHS],
        series=_series(history, entries, begins_s, now_s),
        engines=_engines(history, reports, begins_s, now_s),
        hops=_hops(reports),
        gpus=[GpuFigures(report.hop, report.replica, gpu) for report in reports for gpu in report.gpus],
        outcomes=dict(Counter(one.request.outcome for one in entries).most_common()),
        errors=dict(Counter(one.request.error for one in entries if one.request.error is not None).most_common()),
        slowest=slowest(entries),
    )


def _hop_of(stage: str) -> str | None:
    if stage == UNACCOUNTED:
        return None
    hop, dot, _ = stage.partition(".")
    return hop if dot else _ENGINE


def _totals(history: History) -> TotalFigures:
    totals = history.totals
    return TotalFigures(
        since_s=history.since_s,
        requests=totals.requests,
        prompt_tokens=totals.prompt_tokens,
        completion_tokens=totals.completion_tokens,
        errors=dict(totals.errors.most_common()),
        dropped=history.dropped,
    )


def _bucket(length: str, entries: Sequence[Entry]) -> Bucket:
    accounts = [one.account for one in entries if one.served]
    seconds = add_up(one.parts for one in accounts)
    return Bucket(
        length=length,
        requests=len(entries),
        served=len(accounts),
        seconds=seconds,
        shares=shares(seconds),
        ttft_s=percentiles(known(one.ttft_s for one in accounts)),
        tpot_s=percentiles(known(one.tpot_s for one in accounts)),
        e2e_s=percentiles([one.e2e_s for one in accounts]),
    )


def _bins(history: History, now_s: float) -> list[float]:
    """The begin of each whole bin of the window, as far as anything was reported."""
    if history.since_s is None:
        return []
    first_s = bin_of(max(history.since_s, now_s - history.window_s))
    return [first_s + at * BIN_S for at in range(int((bin_of(now_s) - first_s) / BIN_S))]


def _series(history: History, entries: Sequence[Entry], begins_s: list[float], now_s: float) -> Series:
    counts_of = history.counts(now_s)
    counts = [counts_of.get(begin_s) for begin_s in begins_s]
    # The first bin began before there was anybody to count.
    lasted = [max(1.0, begin_s + BIN_S - max(begin_s, history.since_s or 0.0)) for begin_s in begins_s]
    ttfts = [
        percentiles(values) if begin_s + BIN_S > history.complete_from_s(now_s) else None
        for begin_s, values in zip(begins_s, _ttfts(entries, begins_s), strict=True)
    ]
    rates = list(zip(counts, lasted, strict=True))
    return Series(
        bin_s=BIN_S,
        begins_s=begins_s,
        requests_per_s=[None if one is None else one.requests / seconds for one, seconds in rates],
        completion_tokens_per_s=[None if one is None else one.completion_tokens / seconds for one, seconds in rates],
        errors_per_s=[None if one is None else one.errors / seconds for one, seconds in rates],
        ttft_p50_s=[None if one is None else one.p50 for one in ttfts],
        ttft_p95_s=[None if one is None else one.p95 for one in ttfts],
    )


def _ttfts(entries: Sequence[Entry], begins_s: Sequence[float]) -> list[list[float]]:
    """The known TTFTs of each bin, by when their request ended."""
    bins: dict[float, list[float]] = {begin_s: [] for begin_s in begins_s}
    for one in entries:
        begin_s = bin_of(one.at_s)
        if one.served and one.account.ttft_s is not None and begin_s in bins:
            bins[begin_s].append(one.account.ttft_s)
    return list(bins.values())


def _recent(history: History, entries: Sequence[Entry], reports: Sequence[HopReport], now_s: float) -> Recent:
    end_s = now_s - _REPORTED_AFTER_S
    begin_s = max(end_s - BIN_S, history.complete_from_s(now_s) - _REPORTED_AFTER_S)
    if begin_s >= end_s or all(report.hop != GATEWAY for report in reports):
        return Recent(None, None, None)
    ends = [one.at_s for one in entries]
    those = [one.request for one in entries[bisect_left(ends, begin_s) : bisect_left(ends, end_s)]]
    seconds = max(1.0, end_s - begin_s)
    return Recent(
        requests_per_s=len(those) / seconds,
        completion_tokens_per_s=sum(one.completion_tokens or 0 for one in those) / seconds,
        errors_per_s=sum(one.error is not None for one in those) / seconds,
    )


def _engines(
    history: History, reports: Sequence[HopReport], begins_s: Sequence[float], now_s: float
) -> list[EngineFigures]:
    alive: dict[Replica, HopReport] = {(report.hop, report.replica): report for report in reports}
    engines = []
    for replica, bins in sorted(history.loads(now_s).items()):
        load = alive[replica].load if replica in alive else None
        peaks = [bins.get(begin_s) for begin_s in begins_s]
        looked_up = 0 if load is None else load.prefix_queries_tokens
        engine = EngineFigures(
            hop=replica[0],
            replica=replica[1],
            load=load,
            prefix_hit_share=load.prefix_hits_tokens / looked_up if load is not None and looked_up else None,
            running=[None if one is None else one.running for one in peaks],
            waiting=[None if one is None else one.waiting for one in peaks],
            kv_usage=[None if one is None else one.kv_usage for one in peaks],
        )
        engines.append(engine)
    return engines


def _hops(reports: Sequence[HopReport]) -> list[HopFigures]:
    """In the path's order; a hop that this file does not know comes last."""
    hops = {report.hop for report in reports}
    in_order = [hop for hop in _HOPS if hop in hops] + sorted(hops.difference(_HOPS))
    return [_hop(hop, [report for report in reports if report.hop == hop]) for hop in in_order]


def _hop(hop: str, reports: Sequence[HopReport]) -> HopFigures:
    return HopFigures(
        hop=hop,
        replicas=len(reports),
        in_flight=sum(one.in_flight for one in reports),
        queued=sum(one.queued for one in reports),
        exported_spans=sum(one.exported_spans for one in reports),
        dropped_spans=sum(one.dropped_spans for one in reports),
    )
