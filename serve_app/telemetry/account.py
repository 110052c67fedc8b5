"""Where one request's time went: from its measured stages to TTFT, TPOT, E2E and each stage's part of the wait.

Every instant of the wall time belongs to one stage: of those that were busy, the one nearest the client, since that is
what the client waited for last. Instants in which none was busy are `unaccounted`. The parts so add up to the wall time
and none is negative. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from serve_app.messages import RequestMetrics, Stage
from serve_app.telemetry.names import DECODE, STAGES, UNACCOUNTED, Length, length_bucket

_RANK = {name: rank for rank, name in enumerate(STAGES)}


@dataclass(frozen=True, slots=True)
class Account:
    """Seconds of one request; None is unknown.

    ttft_s: from its arrival to the first token: written, where it streams, else made by the engine.
    tpot_s: mean time between two tokens of a choice, as the engine made them; unknown below two tokens.
    longest_gap_s: the longest time between two deltas of a choice.
    e2e_s: from its arrival to the last byte.
    parts: seconds of each stage that has any, and of `unaccounted`; they add up to `e2e_s`.
    """

    length: Length
    ttft_s: float | None
    tpot_s: float | None
    longest_gap_s: float | None
    e2e_s: float
    parts: dict[str, float]

    @property
    def unaccounted_s(self) -> float:
        """Wall time that no stage covers."""
        return self.parts[UNACCOUNTED]


def account(request: RequestMetrics) -> Account:
    """Everything that follows from what was measured."""
    gaps = [choice.longest_gap_s for choice in request.choices if choice.longest_gap_s is not None]
    return Account(
        length=length_bucket(request.prompt_tokens),
        ttft_s=_ttft_s(request),
        tpot_s=_tpot_s(request),
        longest_gap_s=max(gaps, default=None),
        e2e_s=max(0.0, request.ended_s - request.arrived_s),
        parts=parts(request.stages, request.arrived_s, request.ended_s),
    )


def parts(stages: tuple[Stage, ...], begin_s: float, end_s: float) -> dict[str, float]:
    """Seconds of each stage between the two moments, and what remains as `unaccounted`.

    Stages of names that are not known here, from a newer hop, are left out: their time is unaccounted.
    """
    stages = tuple(one for one in stages if one.name in _RANK)
    seconds = _sweep([span for one in stages for span in _spans(one, begin_s, end_s)])
    left = max(0.0, end_s - begin_s - sum(seconds.values()))
    for one in stages:
        # The short pieces of summed work, whose place is not known: they lie where the engine decoded meanwhile.
        dust = max(0.0, one.busy_s - sum(end - begin for begin, end in one.pieces)) if one.pieces else 0.0
        if one.count > 1 and dust > 0:
            from_decode = min(dust, seconds.get(DECODE, 0.0)) if one.name != DECODE else 0.0
            from_left = min(dust - from_decode, left)
            if from_decode:
                seconds[DECODE] -= from_decode
            left -= from_left
            seconds[one.name] = seconds.get(one.name, 0.0) + from_decode + from_left
    return {name: seconds[name] for name in STAGES if name in seconds} | {UNACCOUNTED: left}


def _spans(one: Stage, begin_s: float, end_s: float) -> Iterator[tuple[int, float, float]]:
    """Where the stage was busy, inside the two moments: (rank, begin, end)."""
    for begin, end in one.pieces or ((one.begin_s, one.end_s),):
        begin, end = max(begin, begin_s), min(end, end_s)
        if begin < end:
            yield _RANK[one.name], begin, end


def _sweep(spans: list[tuple[int, float, float]]) -> dict[str, float]:
    """Gives each instant to the busy stage of the highest rank."""
    edges = sorted([(begin, rank, 1) for rank, begin, _ in spans] + [(end, rank, -1) for rank, _, end in spans])
    counts = [0] * len(STAGES)
    busy = 0  # one bit per rank
    seconds: dict[str, float] = {}
    before = 0.0
    for moment, rank, change in edges:
        if busy:
            top = STAGES[busy.bit_length() - 1]
            seconds[top] = seconds.get(top, 0.0) + moment - before
        counts[rank] += change
        busy = busy | 1 << rank if counts[rank] else busy & ~(1 << rank)
        before = moment
    return seconds


def _ttft_s(request: RequestMetrics) -> float | None:
    made = [choice.first_token_s for choice in request.choices if choice.first_token_s is not None]
    first_s = request.first_write_s if request.stream else min(made, default=None)
    return None if first_s is None else max(0.0, first_s - request.arrived_s)


def _tpot_s(request: RequestMetrics) -> float | None:
    seconds, gaps = 0.0, 0
    for choice in request.choices:
        if choice.tokens > 1 and choice.first_token_s is not None and choice.last_token_s is not None:
            seconds += choice.last_token_s - choice.first_token_s
            gaps += choice.tokens - 1
    return max(0.0, seconds) / gaps if gaps else None
