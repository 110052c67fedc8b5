"""Rules for slow requests: slow first token, slow tokens, slow everything. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from serve_app.explain.levers import BETWEEN, LAYERS
from serve_app.explain.symptom import (
    LARGER_PART,
    MIN_REQUESTS,
    TPOT_BOUND_S,
    TTFT_BOUND_S,
    Symptom,
    ms,
    percent,
)
from serve_app.telemetry.measured import Measured, add_up, known, largest
from serve_app.telemetry.names import LENGTHS
from serve_app.telemetry.percentiles import percentiles

Value = Callable[[Measured], float | None]


@dataclass(frozen=True, slots=True)
class Slow:
    """The requests of `scope`, all or one length bucket, that are over a bound which its P95 breaks."""

    scope: str
    p95_s: float
    requests: tuple[Measured, ...]

    def where(self) -> str:
        """The scope, as the beginning of a sentence."""
        return "" if self.scope == "all" else f"{self.scope} prompts: "


def ttft(one: Measured) -> float | None:
    """Seconds to the first token."""
    return one.account.ttft_s


def tpot(one: Measured) -> float | None:
    """Seconds per further token."""
    return one.account.tpot_s


def over(served: Sequence[Measured], value: Value, bound_s: float) -> Slow | None:
    """Looks at all first, then at each length by itself, since a mixed average deceives."""
    for scope in ("all", *LENGTHS):
        those = [one for one in served if scope in ("all", one.account.length)]
        found = percentiles(known(map(value, those)))
        if found is not None and found.p95 > bound_s:
            return Slow(scope, found.p95, tuple(one for one in those if (value(one) or 0.0) > bound_s))
    return None


def slow_first_token(served: Sequence[Measured]) -> list[Symptom]:
    """P95 TTFT is over its bound, or the larger part of the wait lies before the first token."""
    name = "slow first token"
    if (slow := over(served, ttft, TTFT_BOUND_S)) is not None:
        layer, words = _cause((one.before for one in slow.requests), "time before it")
        evidence = f"{slow.where()}P95 TTFT {ms(slow.p95_s)} is over {ms(TTFT_BOUND_S)}; of these requests' {words}"
        return [Symptom(name, True, evidence, layer)]
    share = _share_before(served)
    if share is None or share <= LARGER_PART:
        return []
    layer, words = _cause((one.before for one in served), "time before it")
    p95_s = _p95(served, ttft)
    evidence = f"{percent(share)} of the wait is before the first token (P95 TTFT {ms(p95_s)}); of the {words}"
    return [Symptom(name, False, evidence, layer)]


def slow_tokens(served: Sequence[Measured]) -> list[Symptom]:
    """P95 TPOT is over its bound, or the larger part of the wait lies after the first token."""
    name = "slow tokens"
    if (slow := over(served, tpot, TPOT_BOUND_S)) is not None:
        layer, words = _cause((one.after for one in slow.requests), "time after the first")
        evidence = f"{slow.where()}P95 TPOT {ms(slow.p95_s)} is over {ms(TPOT_BOUND_S)}; of these requests' {words}"
        return [Symptom(name, True, evidence, layer)]
    share = _share_before(served)
    if share is None or share > LARGER_PART:
        return []
    layer, words = _cause((one.after for one in served), "time after it")
    p95_s = _p95(served, tpot)
    evidence = f"{percent(1 - share)} of the wait is after the first token (P95 TPOT {ms(p95_s)}); of the {words}"
    return [Symptom(name, False, evidence, layer)]


def slow_everything(served: Sequence[Measured]) -> list[Symptom]:
    """First token and further tokens are both over their bounds, in all requests or with every length over one."""
    first, further = over(served, ttft, TTFT_BOUND_S), over(served, tpot, TPOT_BOUND_S)
    if first is None or further is None:
        return []
    both = first.scope == further.scope == "all"
    if not both and not _every_length_is_slow(served):
        return []
    what = "P95 TTFT and P95 TPOT are both over their bounds" if both else "every length of prompt is over a bound"
    layer, cause = _common(served)
    return [Symptom("slow everything", True, f"{what}; {cause}", layer)]


def _every_length_is_slow(served: Sequence[Measured]) -> bool:
    groups = [[one for one in served if one.account.length == length] for length in LENGTHS if length != "unknown"]
    groups = [group for group in groups if len(group) >= MIN_REQUESTS]
    return len(groups) > 1 and all(
        over(group, ttft, TTFT_BOUND_S) or over(group, tpot, TPOT_BOUND_S) for group in groups
    )


def _common(served: Sequence[Measured]) -> tuple[str | None, str]:
    """One hop that is behind both halves of the wait, if there is one; else the layer with the largest share."""
    before, after = (largest(add_up(getattr(one, half) for one in served)) for half in ("before", "after"))
    seconds = add_up(one.account.parts for one in served)
    if before is None or after is None:
        return None, "what is common to them is unknown"
    hop = LAYERS[before[0]].hop
    if hop != LAYERS[after[0]].hop:
        found = largest(seconds)
        return found and found[0], f"no one hop: before the first token it is {before[0]}, after it {after[0]}"
    found = largest({name: one for name, one in seconds.items() if LAYERS[name].hop == hop})
    place = "the way between the hops" if hop == BETWEEN else f"the {hop}"
    return found and found[0], f"one cause, {place}: before the first token {before[0]}, after it {after[0]}"


def _cause(halves: Iterable[Mapping[str, float]], words: str) -> tuple[str | None, str]:
    """The layer with the largest share of these seconds, and the end of a sentence that says so."""
    found = largest(add_up(halves))
    if found is None:
        return None, f"{words} nothing is known"
    return found[0], f"{words} {percent(found[1])} is {found[0]}"


def _share_before(served: Sequence[Measured]) -> float | None:
    """The share of the wait that lies before the first token, of the requests that have one."""
    those = [one for one in served if one.before]
    total = sum(one.account.e2e_s for one in those)
    return sum(sum(one.before.values()) for one in those) / total if total > 0 else None


def _p95(served: Sequence[Measured], value: Value) -> float | None:
    found = percentiles(known(map(value, served)))
    return None if found is None else found.p95
