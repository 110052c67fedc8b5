"""From the answers of one load to its figures. Pure: time stamps in, numbers out.

Steady state alone counts: events, first events and ends within the window, whenever their requests were sent.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec
from bench.client import Answer

PERCENTILES = (50, 90, 99)


class Figures(msgspec.Struct, frozen=True):
    """What clients saw within a window.

    tokens: that arrived. requests: that ended, the failed ones included. failures: how many of all requests of the load
    failed, by reason, in the window or out of it. events_per_token: below 1 where a system sends tokens together.
    ttft_ms: from sending to the first event with text; tpot_ms: from there to the last one, per token but the first;
    itl_ms: from one event to the next. Each by percentile.
    """

    tokens: float
    tokens_per_s: float
    requests: int
    failures: dict[str, int]
    events_per_token: float | None
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]


def figures(answers: Sequence[Answer], begin_s: float, end_s: float) -> Figures:
    """The window's figures; a failed request's events count as a token each, and its times do not."""
    tokens, ttft, tpot, itl = 0.0, [], [], []
    whole = [one for one in answers if one.error is None and one.event_s]
    for one in answers:
        arrived = sum(begin_s <= at < end_s for at in one.event_s)
        tokens += arrived * (one.tokens / len(one.event_s) if one.tokens else 1)
    for one in whole:
        first_s, last_s = one.event_s[0], one.event_s[-1]
        if begin_s <= first_s < end_s:
            ttft.append((first_s - one.sent_s) * 1000)
        if begin_s <= last_s < end_s and one.tokens > 1:
            tpot.append((last_s - first_s) * 1000 / (one.tokens - 1))
        itl += [
            (after - before) * 1000 for before, after in pairwise(one.event_s) if begin_s <= before and after < end_s
        ]
    events = sum(len(one.event_s) for one in whole)
    return Figures(
        tokens=tokens,
        tokens_per_s=tokens / (end_s - begin_s),
        requests=sum(begin_s <= one.end_s < end_s for one in answers),
        failures=dict(Counter(one.error for one in answers if one.error is not None)),
        events_per_token=events / sum(one.tokens for one in whole) if events else None,
        ttft_ms=percentiles(ttft),
        tpot_ms=percentiles(tpot),
        itl_ms=percentiles(itl),
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """`{"p50": …, "p90": …, "p99": …}`, between two values by their distance; empty when there are none."""
    ordered = sorted(values)
    return {f"p{share}": _at(ordered, share / 100) for share in PERCENTILES} if ordered else {}


def _at(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
