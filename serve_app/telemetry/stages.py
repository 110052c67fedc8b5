"""Measures the stages of one request where they happen. No clock but the wall's, since hops run on several machines."""

import heapq
import time

import msgspec

from serve_app.messages import EngineDelta, EngineTimes, RequestContext, Stage
from serve_app.telemetry.names import DECODE, ENGINE_QUEUE, PREFILL

# Pieces of summed work whose place is kept; of shorter ones only the sum.
_KEPT_PIECES = 16


def stage(name: str, begin_s: float, end_s: float | None = None) -> Stage:
    """One uninterrupted stage; without an end it ends now. Never negative: two machines' clocks may differ."""
    end_s = max(begin_s, time.time() if end_s is None else end_s)
    return Stage(name, begin_s, end_s, end_s - begin_s, 1, end_s - begin_s)


def queue_stage(name: str, context: RequestContext, begun_s: float) -> Stage:
    """The time from the moment the sender let go of the request until work on it began."""
    sent_s = begun_s if context.sent_s is None else min(context.sent_s, begun_s)
    return stage(name, sent_s, begun_s)


class Work:
    """Work that comes in many pieces, summed into one stage: a span per token would cost more than the token."""

    __slots__ = ("_begin_s", "_count", "_end_s", "_longest", "_name", "_total_s")

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin_s: float | None = None
        self._end_s = 0.0
        self._count = 0
        self._total_s = 0.0
        self._longest: list[tuple[float, float, float]] = []  # a heap of (length, begin, end)

    def add(self, begin_s: float, end_s: float) -> None:
        """One piece, later than those before it."""
        length = max(0.0, end_s - begin_s)
        if self._begin_s is None:
            self._begin_s = begin_s
        self._end_s = begin_s + length
        self._count += 1
        self._total_s += length
        if len(self._longest) < _KEPT_PIECES:
            heapq.heappush(self._longest, (length, begin_s, self._end_s))
        elif length > self._longest[0][0]:
            heapq.heapreplace(self._longest, (length, begin_s, self._end_s))

    def stages(self) -> tuple[Stage, ...]:
        """The one stage, or none if there was no piece."""
        if self._begin_s is None:
            return ()
        pieces = tuple(sorted((begin_s, end_s) for _, begin_s, end_s in self._longest))
        longest_s = max(length for length, _, _ in self._longest)
        return (Stage(self._name, self._begin_s, self._end_s, self._total_s, self._count, longest_s, pieces),)


def aligned(stages: tuple[Stage, ...], sent_s: float, received_s: float) -> tuple[Stage, ...]:
    """Another machine's stages on the caller's clock: inside the call, from `sent_s` to `received_s`.

    Stages that lie inside it already are left alone. Those that do not prove that the clocks differ by at least what
    they stick out by, and are moved by that much; what was begun by the sender (a queue) still begins with it. What is
    longer than the call, because a clock was set meanwhile, is cut to it.
    """
    if not stages:
        return stages
    latest_s = max(one.end_s for one in stages)
    earliest_s = min(one.begin_s for one in stages)
    if latest_s > received_s:
        shift_s = received_s - latest_s
    elif earliest_s < sent_s:
        shift_s = sent_s - earliest_s
    else:
        return stages

    def moved(moment_s: float) -> float:
        return min(max(sent_s, moment_s + shift_s), received_s)

    def move(one: Stage) -> Stage:
        begin_s, end_s = moved(one.begin_s), moved(one.end_s)
        pieces = tuple((moved(begin), moved(end)) for begin, end in one.pieces)
        busy_s, longest_s = min(one.busy_s, end_s - begin_s), min(one.longest_s, end_s - begin_s)
        return Stage(one.name, begin_s, end_s, busy_s, one.count, longest_s, pieces)

    return tuple(move(one) for one in stages)


def times_with(delta: EngineDelta, known: EngineTimes | None) -> EngineTimes | None:
    """What is known of the engine's times once `delta` has come. Which token was the last is known at the end only."""
    if delta.times is None or delta.finish_reason is not None:
        return delta.times or known
    return msgspec.structs.replace(delta.times, last_token_s=None)


def engine_stages(context: RequestContext, times: EngineTimes | None, ended_s: float) -> tuple[Stage, ...]:
    """The engine's phases of one choice that was given to it with `context` and ended, whole or not, at `ended_s`.

    A phase whose begin is not known did not happen as far as anybody knows: its time stays with the phase before it.
    """
    times = times or EngineTimes()
    sent_s = ended_s if context.sent_s is None else context.sent_s
    edges = [(ENGINE_QUEUE, sent_s), (PREFILL, times.scheduled_s), (DECODE, times.first_token_s)]
    begun = [(name, begin_s) for name, begin_s in edges if begin_s is not None]
    ends = [begin_s for _, begin_s in begun[1:]] + [times.last_token_s or ended_s]
    return tuple(stage(name, begin_s, end_s) for (name, begin_s), end_s in zip(begun, ends, strict=True))
