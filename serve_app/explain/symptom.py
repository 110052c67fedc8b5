"""What a rule finds, and the bounds that rules compare with, each with its source. Data only."""

from dataclasses import dataclass

from serve_app.explain.levers import Lever

# Interactive users leave beyond it: requirement S2; also MLPerf Inference v4.0, Llama 2 70B, server scenario.
TTFT_BOUND_S = 2.0
# MLPerf Inference v4.0, Llama 2 70B, server scenario: 200 ms a token, about as fast as people read.
TPOT_BOUND_S = 0.2
# More than half of the wait is its larger part.
LARGER_PART = 0.5
# The design's aim: what no stage covers stays under 5 % of the wait at the median.
UNACCOUNTED_AIM = 0.05
# Ours: fewer values than this are not compared with each other.
MIN_REQUESTS = 5
# Ours: a queue that takes a quarter of the short requests' wait, twice the share that it has of the long ones'.
QUEUE_SHARE = 0.25
QUEUE_FACTOR = 2.0
# Ours: a fifth slower is more than the noise of a shared machine; S6 asks that it is noticed.
DRIFT_FACTOR = 1.2
# Ours: within less than five minutes it is a change of the load, not of the service.
DRIFT_WINDOW_S = 300.0


@dataclass(frozen=True, slots=True)
class Symptom:
    """Something that is wrong, or where the larger part of the wait is.

    over_bound: a bound is broken; without it the symptom only says where to look first.
    evidence: the numbers, as a sentence.
    layer: what causes it, a key of `LAYERS`, whose levers come with it; None where the measurements cannot tell.
    levers: further ones, of this symptom alone.
    """

    name: str
    over_bound: bool
    evidence: str
    layer: str | None
    levers: tuple[Lever, ...] = ()


def ms(seconds: float | None) -> str:
    """Milliseconds with their unit, or `unknown`."""
    if seconds is None:
        return "unknown"
    return f"{seconds * 1000:,.1f} ms" if abs(seconds) < 0.1 else f"{seconds * 1000:,.0f} ms"


def percent(share: float) -> str:
    """A share as whole percents, with one decimal below ten."""
    return f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"
