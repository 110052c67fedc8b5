"""Medians, spreads and ratios over rounds. Pure: measurements in, numbers out.

A ratio is taken within one round and at the same number of clients, so that what slows the machine for a while falls
out of it.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec
from bench.measure import Idle, Measurement
from bench.processes import ENGINE

TOKENS_PER_S = "tokens/s"
CPU = "CPU: all"
SERVING_CPU = "CPU: serving"
ENGINE_CPU = f"CPU: {ENGINE}"


class Median(msgspec.Struct, frozen=True):
    """The median of so many rounds, the least and the greatest."""

    median: float
    low: float
    high: float
    rounds: int


# By system, by number of clients, by metric.
Summary = dict[str, dict[int, dict[str, Median]]]


def metrics(one: Measurement) -> dict[str, float]:
    """A measurement by name: tokens/s, times in ms, CPU-seconds per 1,000 tokens by process group, and cores.

    Serving is all but vLLM's engine core and workers. No token, no CPU time per token.
    """
    seen = one.figures
    named = {
        TOKENS_PER_S: seen.tokens_per_s,
        "cores: client": one.client_cores,
        "cores: elsewhere": one.elsewhere_cores,
        "client late": one.client_late_ms,
    }
    for name, percentiles in (("TTFT", seen.ttft_ms), ("TPOT", seen.tpot_ms), ("ITL", seen.itl_ms)):
        named |= {f"{name} {share}": value for share, value in percentiles.items()}
    if seen.events_per_token is not None:
        named["events/token"] = seen.events_per_token
    if seen.tokens_per_s > 0:
        per_1000 = 1000 / (one.window_s * seen.tokens_per_s)
        whole, engine = sum(one.cpu_s.values()), one.cpu_s.get(ENGINE, 0.0)
        named |= {f"CPU: {group}": cpu_s * per_1000 for group, cpu_s in one.cpu_s.items()}
        named |= {CPU: whole * per_1000, SERVING_CPU: (whole - engine) * per_1000}
    return named


def summary(measurements: Iterable[Measurement]) -> Summary:
    """Each metric's median over the rounds."""
    return _medians((one.system, one.clients, metrics(one)) for one in measurements)


def ratios(measurements: Sequence[Measurement], baseline: str) -> Summary:
    """Each metric divided by the baseline's of the same round and number of clients."""
    return _divided(
        measurements,
        [one for one in measurements if one.system == baseline],
        lambda one: (one.round, one.clients),
    )


def growth(measurements: Sequence[Measurement]) -> Summary:
    """Each metric divided by that of the same system and round with the fewest clients."""
    fewest = min((one.clients for one in measurements), default=0)
    return _divided(
        measurements,
        [one for one in measurements if one.clients == fewest],
        lambda one: (one.system, one.round),
    )


def idle(rests: Iterable[Idle]) -> dict[str, dict[str, Median]]:
    """Cores (CPU-seconds per second) of a system at rest, by process group."""
    of_none = 0
    shares = _medians(
        (
            one.system,
            of_none,
            {group: cpu_s / one.window_s for group, cpu_s in (one.cpu_s | {"all": _sum(one)}).items()},
        )
        for one in rests
    )
    return {system: by_clients[of_none] for system, by_clients in shares.items()}


def _sum(one: Idle) -> float:
    return sum(one.cpu_s.values())


def _divided(
    measurements: Iterable[Measurement],
    below: Iterable[Measurement],
    key: Callable[[Measurement], tuple[object, ...]],
) -> Summary:
    """What has no counterpart, or one of zero, has no ratio."""
    divisors = {key(one): metrics(one) for one in below}
    return _medians(
        (one.system, one.clients, _quotients(metrics(one), divisors[key(one)]))
        for one in measurements
        if key(one) in divisors
    )


def _quotients(above: dict[str, float], below: dict[str, float]) -> dict[str, float]:
    return {name: value / below[name] for name, value in above.items() if below.get(name)}


def _medians(rows: Iterable[tuple[str, int, dict[str, float]]]) -> Summary:
    gathered: dict[str, dict[int, dict[str, list[float]]]] = {}
    for system, clients, named in rows:
        by_metric = gathered.setdefault(system, {}).setdefault(clients, {})
        for name, value in named.items():
            by_metric.setdefault(name, []).append(value)
    return {
        system: {
            clients: {name: median(values) for name, values in by_metric.items()}
            for clients, by_metric in by_clients.items()
        }
        for system, by_clients in gathered.items()
    }


def median(values: Sequence[float]) -> Median:
    """Of at least one value."""
    return Median(statistics.median(values), min(values), max(values), len(values))
