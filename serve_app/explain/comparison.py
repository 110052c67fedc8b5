"""Rules that compare groups of requests: short with long ones of the same time, new ones with old ones. Pure."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median

from serve_app.explain.latency import Value, tpot, ttft
from serve_app.explain.levers import Lever
from serve_app.explain.symptom import (
    DRIFT_FACTOR,
    DRIFT_WINDOW_S,
    MIN_REQUESTS,
    QUEUE_FACTOR,
    QUEUE_SHARE,
    Symptom,
    ms,
    percent,
)
from serve_app.telemetry.measured import Measured, add_up, known, shares
from serve_app.telemetry.names import ENGINE_QUEUE, LENGTHS, POSTPROCESS_QUEUE, STAGES, TOKENIZER_QUEUE, UNACCOUNTED

_QUEUES = (TOKENIZER_QUEUE, POSTPROCESS_QUEUE, ENGINE_QUEUE)
HEAD_OF_LINE_LEVERS = {
    TOKENIZER_QUEUE: (Lever("tokenizer.threads", "more: a long text then occupies one of many"),),
    POSTPROCESS_QUEUE: (Lever("postprocess.max_ongoing_requests", "more: long requests then leave places free"),),
    ENGINE_QUEUE: (
        Lever("engine.vllm_args.enable_chunked_prefill", "true: a long prompt is computed in pieces"),
        Lever("engine.vllm_args.max_num_batched_tokens", "less: smaller pieces, shorter steps"),
        Lever("engine.vllm_args.long_prefill_token_threshold", "caps a long prompt's tokens in one step"),
        Lever("model.context_tokens", "less: refuse what is longer than needed"),
    ),
}
DRIFT_LEVERS = (
    Lever("insight.window_s", "more, with insight.max_requests: look back over hours"),
    Lever("engine.replicas", "more, if the load has grown; else restart one engine and compare"),
)


def slow_only_for_short(served: Sequence[Measured]) -> list[Symptom]:
    """Short requests wait in a queue, long ones of the same time proportionally far less: head of line blocking."""
    long = [one for one in served if one.account.length == "long"]
    beside, alone = _beside([one for one in served if one.account.length == "short"], long)
    if min(len(beside), len(long)) < MIN_REQUESTS:
        return []
    of_short, of_long = (shares(add_up(one.account.parts for one in group)) for group in (beside, long))
    queue = max(_QUEUES, key=lambda name: of_short.get(name, 0.0))
    share, other = of_short.get(queue, 0.0), of_long.get(queue, 0.0)
    if share < QUEUE_SHARE or share < QUEUE_FACTOR * other:
        return []
    words = "none ran without long ones, so the length of the queue may have another cause"
    if len(alone) >= MIN_REQUESTS:
        with_s, without_s = _median_part(beside, queue), _median_part(alone, queue)
        if with_s < QUEUE_FACTOR * without_s:
            return []
        words = f"the median is {ms(with_s)} there beside long ones and {ms(without_s)} without"
    evidence = f"short requests spend {percent(share)} of their wait in {queue}, long ones {percent(other)}; {words}"
    return [Symptom("slow only for short", True, evidence, queue, HEAD_OF_LINE_LEVERS[queue])]


def _beside(short: Sequence[Measured], long: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """The short requests during which a long one was in the system, and the others."""
    spans = sorted((one.request.arrived_s, one.request.ended_s) for one in long)
    begins = [begin_s for begin_s, _ in spans]
    latest = list(accumulate((end_s for _, end_s in spans), max))
    beside: list[Measured] = []
    alone: list[Measured] = []
    for one in short:
        begun = bisect_right(begins, one.request.ended_s)
        meets = begun > 0 and latest[begun - 1] >= one.request.arrived_s
        (beside if meets else alone).append(one)
    return beside, alone


def _median_part(group: Sequence[Measured], name: str) -> float:
    return median(one.account.parts.get(name, 0.0) for one in group)


def slow_after_hours(served: Sequence[Measured]) -> list[Symptom]:
    """The newest third is slower than the oldest third, compared length by length so that their mix is the same."""
    ordered = sorted(served, key=lambda one: one.request.arrived_s)
    third = len(ordered) // 3
    if not third or ordered[-1].request.arrived_s - ordered[0].request.arrived_s < DRIFT_WINDOW_S:
        return []
    old, new = ordered[:third], ordered[-third:]
    factors = {name: _factor(old, new, value) for name, value in (("TTFT", ttft), ("TPOT", tpot))}
    risen = {name: one for name, one in factors.items() if one is not None and one >= DRIFT_FACTOR}
    if not risen:
        return []
    layer, grown_s = _grown(old, new)
    minutes = (new[0].request.arrived_s - old[0].request.arrived_s) / 60
    words = " and ".join(f"median {name} is {factor:.1f} times" for name, factor in risen.items())
    rates = " and ".join(f"{_rate(group):.2f}/s" for group in (old, new))
    evidence = f"{words} what it was {minutes:.0f} min before, at the same lengths; {layer} grew most, by {ms(grown_s)}"
    return [Symptom("slow after hours", True, f"{evidence} a request; arrivals were {rates}", layer, DRIFT_LEVERS)]


def _factor(old: Sequence[Measured], new: Sequence[Measured], value: Value) -> float | None:
    """How many times its old median the new one is: the mean over the lengths, each weighted by its requests."""
    total, weights = 0.0, 0
    for before, after in _by_length(old, new):
        past, present = known(map(value, before)), known(map(value, after))
        weight = min(len(past), len(present))
        if weight >= MIN_REQUESTS and median(past) > 0:
            total += weight * median(present) / median(past)
            weights += weight
    return total / weights if weights else None


def _grown(old: Sequence[Measured], new: Sequence[Measured]) -> tuple[str, float]:
    """The layer whose mean seconds per request grew most, at the same lengths, and by how many."""
    growth = dict.fromkeys((*STAGES, UNACCOUNTED), 0.0)
    pairs = [pair for pair in _by_length(old, new) if min(map(len, pair)) >= MIN_REQUESTS]
    weights = [min(map(len, pair)) for pair in pairs]
    for (before, after), weight in zip(pairs, weights, strict=True):
        past, present = _means(before), _means(after)
        for name in growth:
            growth[name] += weight / sum(weights) * (present.get(name, 0.0) - past.get(name, 0.0))
    return max(growth.items(), key=lambda item: item[1])


def _by_length(old: Sequence[Measured], new: Sequence[Measured]) -> list[tuple[list[Measured], list[Measured]]]:
    return [
        ([one for one in old if one.account.length == length], [one for one in new if one.account.length == length])
        for length in LENGTHS
    ]


def _means(group: Sequence[Measured]) -> Mapping[str, float]:
    return {name: seconds / len(group) for name, seconds in add_up(one.account.parts for one in group).items()}


def _rate(group: Sequence[Measured]) -> float:
    """Arrivals per second, over the gaps between the group's own."""
    span_s = group[-1].request.arrived_s - group[0].request.arrived_s
    return (len(group) - 1) / span_s if span_s > 0 else 0.0
