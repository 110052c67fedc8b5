"""P50, P95 and P99 of measured values: one definition for every view of the insight. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Percentiles:
    """In the unit of the values."""

    p50: float
    p95: float
    p99: float


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """Percentiles of the values in any order; None where there are none, since nothing is known then."""
    if not values:
        return None
    ordered = sorted(values)
    return Percentiles(_at(ordered, 0.50), _at(ordered, 0.95), _at(ordered, 0.99))


def _at(ordered: Sequence[float], share: float) -> float:
    """Linear between the two closest ranks: of n values the rank is `share * (n - 1)`, as numpy's default has it."""
    rank = share * (len(ordered) - 1)
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)
