"""One ended request with its account, and sums over many of them. Pure; seconds, None is unknown."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from serve_app.messages import RequestMetrics, Stage
from serve_app.telemetry.account import Account, account, parts
from serve_app.telemetry.names import STAGES, UNACCOUNTED

# Turned away before any work: what they waited says nothing of the layers.
_UNSERVED = ("invalid", "refused")


@dataclass(frozen=True, slots=True)
class Measured:
    """`before` and `after` are the parts before and after the first token, in seconds; empty where that is unknown."""

    request: RequestMetrics
    account: Account
    before: dict[str, float]
    after: dict[str, float]

    @property
    def served(self) -> bool:
        """Whether any work was done for it, however it ended."""
        return self.request.outcome not in _UNSERVED


def measure(request: RequestMetrics) -> Measured:
    """Stages that this version does not know, as another version's gateway may send, count as `unaccounted`."""
    if any(one.name not in STAGES for one in request.stages):
        known = tuple(one for one in request.stages if one.name in STAGES)
        request = msgspec.structs.replace(request, stages=known)
    found = account(request)
    if found.ttft_s is None:
        return Measured(request, found, {}, {})
    first_s = min(request.arrived_s + found.ttft_s, request.ended_s)
    before = parts(tuple(map(_placed, request.stages)), request.arrived_s, first_s)
    after = {name: max(0.0, seconds - before.get(name, 0.0)) for name, seconds in found.parts.items()}
    return Measured(request, found, before, after)


def add_up(many: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of each layer over all of them, in the path's order."""
    sums: dict[str, float] = {}
    for one in many:
        for name, seconds in one.items():
            sums[name] = sums.get(name, 0.0) + seconds
    return {name: sums[name] for name in (*STAGES, UNACCOUNTED) if name in sums}


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Each layer's share of the sum; empty where nothing was waited for."""
    total = sum(seconds.values())
    return {name: one / total for name, one in seconds.items()} if total > 0 else {}


def largest(seconds: Mapping[str, float]) -> tuple[str, float] | None:
    """The layer with the largest share, and that share; the earlier on the path of two equal ones."""
    of_all = shares(seconds)
    return max(of_all.items(), key=lambda item: item[1]) if of_all else None


def known(values: Iterable[float | None]) -> Sequence[float]:
    """Those that are not None."""
    return [value for value in values if value is not None]


def _placed(one: Stage) -> Stage:
    """Without the short pieces whose place is not known: they cannot be said to lie before the first token."""
    if not one.pieces:
        return one
    return msgspec.structs.replace(one, busy_s=sum(end_s - begin_s for begin_s, end_s in one.pieces))
