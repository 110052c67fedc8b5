"""From requests that have ended to the layer that costs most, the symptoms, and the levers. Pure.

The rules are in `latency.py`, `comparison.py` and `failures.py`, their bounds in `symptom.py`, the layers and their
levers in `levers.py`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from serve_app.explain.comparison import slow_after_hours, slow_only_for_short
from serve_app.explain.failures import errors
from serve_app.explain.latency import slow_everything, slow_first_token, slow_tokens, tpot, ttft
from serve_app.explain.levers import LAYERS, Layer
from serve_app.explain.symptom import Symptom
from serve_app.explain.waterfall import Waterfall, waterfall
from serve_app.messages import RequestMetrics
from serve_app.telemetry.measured import Measured, add_up, known, largest, measure, shares
from serve_app.telemetry.names import LENGTHS
from serve_app.telemetry.percentiles import Percentiles, percentiles

# Of the requests that any work was done for; errors are looked at by themselves, among all.
_RULES: tuple[Callable[[Sequence[Measured]], list[Symptom]], ...] = (
    slow_everything,
    slow_first_token,
    slow_tokens,
    slow_only_for_short,
    slow_after_hours,
)


@dataclass(frozen=True, slots=True)
class StagePart:
    """A layer's part in a bucket: seconds of the `requests` that have it, and its share of the bucket's whole wait."""

    name: str
    requests: int
    seconds: Percentiles
    share: float | None


@dataclass(frozen=True, slots=True)
class Bucket:
    """The requests of one length of prompt, or of `all`.

    served: how many had any work done for them; stages, e2e_s, ttft_s and tpot_s are theirs. None is unknown.
    """

    name: str
    requests: int
    served: int
    stages: tuple[StagePart, ...]
    e2e_s: Percentiles | None
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    outcomes: dict[str, int]
    errors: dict[str, int]
    dominant: str | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a set of requests says.

    begin_s, end_s: first arrival and last end, by the wall clock. None is unknown.
    buckets: `all`, then each length that has requests.
    dominant: the layer with the largest share of the wait of all.
    unaccounted: the median share that no stage covers.
    layers: those named above, with their meaning and levers.
    waterfalls: each request by itself, the newest last, where that was asked for.
    """

    begin_s: float | None
    end_s: float | None
    buckets: tuple[Bucket, ...]
    dominant: str | None
    unaccounted: float | None
    symptoms: tuple[Symptom, ...]
    layers: tuple[Layer, ...]
    waterfalls: tuple[Waterfall, ...] = ()


def explain(requests: Sequence[RequestMetrics], one_by_one: bool = False) -> Explanation:
    """Everything that follows from the requests; `one_by_one` adds a waterfall for each."""
    measured = sorted(map(measure, requests), key=lambda one: one.request.arrived_s)
    served = [one for one in measured if one.served]
    everything = _bucket("all", measured)
    symptoms = (*errors(measured), *(found for rule in _RULES for found in rule(served)))
    waterfalls = tuple(map(waterfall, measured)) if one_by_one else ()
    named = [everything.dominant, *(one.layer for one in symptoms), *(one.dominant for one in waterfalls)]
    return Explanation(
        begin_s=min((one.request.arrived_s for one in measured), default=None),
        end_s=max((one.request.ended_s for one in measured), default=None),
        buckets=(everything, *_by_length(measured)) if measured else (),
        dominant=everything.dominant,
        unaccounted=_median_unaccounted(served),
        symptoms=tuple(sorted(symptoms, key=lambda one: not one.over_bound)),
        layers=tuple(LAYERS[name] for name in dict.fromkeys(named) if name is not None),
        waterfalls=waterfalls,
    )


def _by_length(measured: Sequence[Measured]) -> list[Bucket]:
    groups = {length: [one for one in measured if one.account.length == length] for length in LENGTHS}
    return [_bucket(length, group) for length, group in groups.items() if group]


def _bucket(name: str, measured: Sequence[Measured]) -> Bucket:
    served = [one for one in measured if one.served]
    found = largest(add_up(one.account.parts for one in served))
    return Bucket(
        name=name,
        requests=len(measured),
        served=len(served),
        stages=_stages(served),
        e2e_s=percentiles([one.account.e2e_s for one in served]),
        ttft_s=percentiles(known(map(ttft, served))),
        tpot_s=percentiles(known(map(tpot, served))),
        outcomes=dict(Counter(one.request.outcome for one in measured).most_common()),
        errors=dict(Counter(one.request.error for one in measured if one.request.error is not None).most_common()),
        dominant=None if found is None else found[0],
    )


def _stages(served: Sequence[Measured]) -> tuple[StagePart, ...]:
    sums = add_up(one.account.parts for one in served)
    of_all = shares(sums)
    stages = []
    for name in sums:
        values = known(one.account.parts.get(name) for one in served)
        found = percentiles(values)
        if found is not None:
            stages.append(StagePart(name, len(values), found, of_all.get(name)))
    return tuple(stages)


def _median_unaccounted(served: Sequence[Measured]) -> float | None:
    values = [one.account.unaccounted_s / one.account.e2e_s for one in served if one.account.e2e_s > 0]
    return median(values) if values else None
