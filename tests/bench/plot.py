"""Draws a report's summary. Run in the peers' environment, which has matplotlib and not this project:

python plot.py REPORT.json PLOT.svg
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
# The same report gives the same file.
mpl.rcParams["svg.hashsalt"] = "tokenline"
mpl.rcParams["svg.fonttype"] = "none"

from matplotlib import pyplot  # noqa: E402 - the backend is chosen before

# Title: the metric of each panel.
_PANELS = {
    "peers": {
        "tokens/s": "tokens/s",
        "TTFT p50, ms": "TTFT p50",
        "serving CPU-s per 1,000 tokens": "CPU: serving",
    },
    "channel": {
        "all": "CPU: all",
        "gateway": "CPU: gateway",
        "postprocess": "CPU: postprocess",
        "engine replica": "CPU: engine replica",
        "HAProxy": "CPU: HAProxy",
    },
}
_TITLES = {"peers": "", "channel": "CPU-seconds per 1,000 tokens, by process"}
_LOADS = {"peers": "clients", "channel": "streams"}


def main() -> None:
    report = json.loads(Path(sys.argv[1]).read_text())
    panels = _PANELS[report["benchmark"]]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3.4 * len(panels), 3.4), constrained_layout=True)
    for axis, (title, metric) in zip(axes, panels.items(), strict=True):
        _draw(axis, report["summary"], metric)
        axis.set(title=title, xlabel=_LOADS[report["benchmark"]], ylim=(0, None))
    figure.suptitle(_TITLES[report["benchmark"]])
    axes[0].legend(fontsize="small")
    figure.savefig(sys.argv[2], metadata={"Date": None})


def _draw(axis: Any, summary: dict[str, dict[str, Any]], metric: str) -> None:
    """A line for each system; the bars are from the least to the greatest round."""
    counts = sorted({int(clients) for by_clients in summary.values() for clients in by_clients})
    for system, by_clients in summary.items():
        points = [
            (counts.index(int(clients)), named[metric]) for clients, named in by_clients.items() if metric in named
        ]
        points.sort(key=lambda point: point[0])
        middle = [point["median"] for _, point in points]
        bars = [[p["median"] - p["low"] for _, p in points], [p["high"] - p["median"] for _, p in points]]
        axis.errorbar([at for at, _ in points], middle, yerr=bars, label=system, marker="o", markersize=3, capsize=2)
    axis.set_xticks(range(len(counts)), [str(count) for count in counts])
    axis.grid(alpha=0.3)


if __name__ == "__main__":
    main()
