"""Measurements made up: what the benchmarks' arithmetic is tested on."""

from collections.abc import Callable
from typing import Any

import pytest
from bench.figures import Figures
from bench.measure import Measurement

Make = Callable[..., Measurement]


@pytest.fixture
def make() -> Make:
    """A measurement of a system: a window of 10 s, and whatever else is given in place of these."""

    def build(system: str = "tokenline", number: int = 0, clients: int = 8, **changes: Any) -> Measurement:
        tokens_per_s = changes.pop("tokens_per_s", 100.0)
        seen: dict[str, Any] = {
            "tokens": tokens_per_s * 10,
            "tokens_per_s": tokens_per_s,
            "requests": 10,
            "failures": changes.pop("failures", {}),
            "events_per_token": 1.0,
            "ttft_ms": {"p50": 20.0},
            "tpot_ms": {"p50": 5.0},
            "itl_ms": {"p50": 5.0},
        }
        cpu_s = changes.pop("cpu_s", {"gateway": 1.0, "engine core": 5.0})
        return Measurement(system, number, clients, 10.0, Figures(**(seen | changes)), cpu_s, 0.1, 2.0, 0.0)

    return build
