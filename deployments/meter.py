"""Our metrics as Ray's: made once in each replica, exported by its node. The only file that knows Ray's metric classes.

Facts of Ray 2.60, measured here: a value costs 4 µs and 1.1 µs more for each label. Values leave the process every 10 s
(`RAY_metrics_report_interval_ms`, at least 1000): a scrape shows nothing of them before, and a gauge that was not set
for two such intervals disappears. A histogram's `_sum` is made of its buckets' midpoints, so it is an approximation.
"""

from collections.abc import Callable, Mapping, Sequence

from ray.serve.metrics import Counter, Gauge, Histogram

from serve_app.telemetry.metric_table import METRICS, Metric
from serve_app.telemetry.metrics import Observation

_Record = Callable[[float, Mapping[str, str]], None]


class RayMeter:
    """See `Meter`. One per process, made inside its replica: Ray Serve's `deployment`, `replica` and `application` are
    put on each value, and are missing for ever from a meter that was made before there was a replica."""

    def __init__(self) -> None:
        self._record: dict[str, _Record] = {name: _recorder(metric) for name, metric in METRICS.items()}

    def record(self, observations: Sequence[Observation]) -> None:
        """See `Meter.record`. Of one call's counters with the same labels Ray gets the sum, which costs one value."""
        for one in _merged(observations):
            self._record[one.metric](one.value, one.labels)


def exported_name(metric: Metric) -> str:
    """How Prometheus knows it: Ray puts `ray_` ahead of every name and `_total` behind a counter's."""
    return f"ray_{metric.name}_total" if metric.kind == "counter" else f"ray_{metric.name}"


def _merged(observations: Sequence[Observation]) -> list[Observation]:
    """Histograms as they are, and one observation of each counter and label set; Ray cannot take several values."""
    merged: list[Observation] = []
    sums: dict[tuple[str, ...], float] = {}
    counted: dict[tuple[str, ...], Observation] = {}
    for one in observations:
        if METRICS[one.metric].kind != "counter":
            merged.append(one)
            continue
        key = (one.metric, *one.labels.values())
        counted.setdefault(key, one)
        sums[key] = sums.get(key, 0.0) + one.value
    return merged + [Observation(one.metric, sums[key], one.labels) for key, one in counted.items()]


def _counting(counter: Counter) -> _Record:
    """Adds to a counter. Ray's `inc` refuses 0, which makes a series be there before it grows."""

    def count(value: float, labels: Mapping[str, str]) -> None:
        if value:
            counter.inc(value, labels)
        else:
            counter._record(0.0, labels)

    return count


def _recorder(metric: Metric) -> _Record:
    record: _Record
    if metric.kind == "counter":
        record = _counting(Counter(metric.name, metric.description, metric.labels))
    elif metric.kind == "gauge":
        record = Gauge(metric.name, metric.description, metric.labels).set
    else:
        record = Histogram(metric.name, metric.description, list(metric.edges), metric.labels).observe
    return record
