"""Markdown tables of summaries. Pure."""

from collections.abc import Iterable, Sequence

from bench.measure import Failure, Measurement
from bench.processes import GROUPS
from bench.summary import CPU, ENGINE_CPU, SERVING_CPU, TOKENS_PER_S, Median, Summary

# Heading: the metrics of a cell. The first of a cell is shown with its spread.
SPEED = {
    "tokens/s": [TOKENS_PER_S],
    "TTFT p50, ms": ["TTFT p50"],
    "p90, p99": ["TTFT p90", "TTFT p99"],
    "TPOT p50, ms": ["TPOT p50"],
    "p90, p99 ": ["TPOT p90", "TPOT p99"],
    "ITL p50, p90, p99, ms": ["ITL p50", "ITL p90", "ITL p99"],
    "events/token": ["events/token"],
    "cores of client, elsewhere": ["cores: client", "cores: elsewhere"],
    "client late, ms": ["client late"],
}
COST = {"all": [CPU], "serving": [SERVING_CPU], "engine core": [ENGINE_CPU]}
RATIOS = {
    "tokens/s": [TOKENS_PER_S],
    "TTFT p50": ["TTFT p50"],
    "TTFT p99": ["TTFT p99"],
    "TPOT p50": ["TPOT p50"],
    "ITL p99": ["ITL p99"],
    "serving CPU": [SERVING_CPU],
}
_LEAST_CPU_S = 0.0005


def table(summary: Summary, columns: dict[str, list[str]], what: str = "clients") -> str:
    """A row for each number of clients and system, in the order of the systems."""
    counts = sorted({clients for by_clients in summary.values() for clients in by_clients})
    rows = [
        [str(clients), system, *(_cell(summary[system][clients], metrics) for metrics in columns.values())]
        for clients in counts
        for system in summary
        if clients in summary[system]
    ]
    return grid([what, "system", *(heading.strip() for heading in columns)], rows)


def cost_columns(summary: Summary) -> dict[str, list[str]]:
    """A column for each process group that takes any CPU time worth a digit."""
    greatest: dict[str, float] = {}
    for named in (named for by_clients in summary.values() for named in by_clients.values()):
        for name, value in named.items():
            greatest[name] = max(greatest.get(name, 0.0), value.median)
    return {group: [f"CPU: {group}"] for group in GROUPS if greatest.get(f"CPU: {group}", 0.0) >= _LEAST_CPU_S}


def idle_table(rests: dict[str, dict[str, Median]]) -> str:
    """A row for each system: thousandths of a core by process group."""
    groups = [
        group
        for group in ["all", *GROUPS]
        if any(named[group].median > 0 for named in rests.values() if group in named)
    ]
    rows = [
        [system, *(f"{named[group].median * 1000:.0f}" if group in named else "" for group in groups)]
        for system, named in rests.items()
    ]
    return grid(["system", *groups], rows)


def failures(measurements: Iterable[Measurement], failed: Iterable[Failure]) -> str:
    """A line for each system that failed and each load in which requests did; or that there was none."""
    lines = [f"- {one.system}, round {one.round + 1}: {one.error}" for one in failed]
    for one in measurements:
        for reason, count in one.figures.failures.items():
            lines.append(f"- {one.system}, round {one.round + 1}, {one.clients} clients: {count} requests: {reason}")
    return "\n".join(lines) or "No system and no request failed."


def grid(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, columns aligned for those who read it as text."""
    table = [list(headings), *map(list, rows)]
    widths = [max(len(row[place]) for row in table) for place in range(len(headings))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in table
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _cell(named: dict[str, Median], metrics: Sequence[str]) -> str:
    if not all(name in named for name in metrics):
        return "–"
    if len(metrics) > 1:
        return ", ".join(number(named[name].median) for name in metrics)
    value = named[metrics[0]]
    spread = f" ({number(value.low)} to {number(value.high)})" if value.rounds > 1 else ""
    return number(value.median) + spread


def number(value: float) -> str:
    """Three digits that mean something."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"
