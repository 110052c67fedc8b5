"""Our metrics as Ray's: made once from the table, each observation goes to its own; the docs have the same table."""

import re
from pathlib import Path
from typing import Any

import pytest

from deployments import meter
from deployments.meter import RayMeter, exported_name
from serve_app.messages import HopReport, LoadReport, RequestMetrics
from serve_app.telemetry.metric_table import METRICS, Metric
from serve_app.telemetry.metrics import Observation, of_report, of_request

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"
CALLS = {"Counter": "inc", "Gauge": "set", "Histogram": "observe"}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Ray's classes made to remember: how each was made, and what it was told."""
    calls: list[tuple[Any, ...]] = []

    def stand_in(kind: str) -> type:
        def init(self: Any, name: str, *arguments: Any) -> None:
            self.name = name
            calls.append((kind, name, *arguments))

        def record(self: Any, value: float, tags: dict[str, str]) -> None:
            calls.append((CALLS[kind], self.name, value, tags))

        return type(kind, (), {"__init__": init, CALLS[kind]: record, "_record": record})

    for kind in CALLS:
        monkeypatch.setattr(meter, kind, stand_in(kind))
    return calls


def test_every_metric_of_the_table_is_made_once_with_its_labels_and_edges(recorded: list[tuple[Any, ...]]) -> None:
    RayMeter()
    assert [call[1] for call in recorded] == list(METRICS)
    for kind, name, description, *rest in recorded:
        metric = METRICS[name]
        assert (kind.lower(), description) == (metric.kind, metric.description)
        assert rest == ([list(metric.edges), metric.labels] if metric.edges else [metric.labels])


def test_an_observation_goes_to_its_metric_in_the_way_of_its_kind(recorded: list[tuple[Any, ...]]) -> None:
    one = RayMeter()
    recorded.clear()
    labels = {"hop": "gateway"}
    one.record(
        [
            Observation("tokenline_requests", 1, labels),
            Observation("tokenline_in_flight", 3, labels),
            Observation("tokenline_stage_duration_seconds", 0.5, labels),
        ]
    )
    assert recorded == [
        ("set", "tokenline_in_flight", 3, labels),
        ("observe", "tokenline_stage_duration_seconds", 0.5, labels),
        ("inc", "tokenline_requests", 1, labels),
    ]


def test_a_replicas_counters_are_there_at_zero_before_they_grow(recorded: list[tuple[Any, ...]]) -> None:
    one = RayMeter()
    recorded.clear()
    report = HopReport("engine", "engine-0", 1.0, 0, 0, load=LoadReport(0, 0, 0.0, 8))
    one.record(of_report(report, None))
    zeros = {name for _, name, value, _ in recorded if METRICS[name].kind == "counter" and value == 0}
    assert zeros == {
        "tokenline_exported_spans",
        "tokenline_dropped_spans",
        "tokenline_dropped_requests",
        "tokenline_engine_preemptions",
        "tokenline_engine_prefix_query_tokens",
        "tokenline_engine_prefix_hit_tokens",
    }
    recorded.clear()
    one.record(of_report(report, report))
    assert not [name for _, name, _, _ in recorded if METRICS[name].kind == "counter"]


def test_counters_of_one_call_are_summed_for_each_label_set(recorded: list[tuple[Any, ...]]) -> None:
    one = RayMeter()
    recorded.clear()
    ours, theirs = {"hop": "gateway"}, {"hop": "engine"}
    values = [(1, ours), (2, theirs), (4, dict(ours))]
    one.record([Observation("tokenline_exported_spans", value, labels) for value, labels in values])
    assert recorded == [
        ("inc", "tokenline_exported_spans", 5, ours),
        ("inc", "tokenline_exported_spans", 2, theirs),
    ]


def test_every_value_of_a_histogram_counts(recorded: list[tuple[Any, ...]]) -> None:
    one = RayMeter()
    recorded.clear()
    one.record([Observation("tokenline_stage_duration_seconds", 0.5, {"hop": "decode"})] * 3)
    assert recorded == [("observe", "tokenline_stage_duration_seconds", 0.5, {"hop": "decode"})] * 3


def test_rays_own_classes_take_every_metric_and_every_observation() -> None:
    one = RayMeter()
    request = RequestMetrics("r1", "chat", "m", True, 0.0, 1.0, 500, "error", error="internal_error", prompt_tokens=3)
    one.record(of_request(request, "m"))
    one.record(of_report(HopReport("engine", "engine#1", 0.0, 1, 0, 5, load=LoadReport(1, 0, 0.5, 8)), None))


def documented() -> dict[str, tuple[str, ...]]:
    """The rows of the tables of `docs/metrics.md`, by the metric's name: its other cells."""
    rows = re.findall(r"^\| `(ray_[a-z_]+)` \|(.*)\|$", DOCS.read_text(), flags=re.MULTILINE)
    return {name: tuple(cell.strip() for cell in cells.split("|")) for name, cells in rows}


# What the docs call the labels that metrics have in common.
REQUEST = METRICS["tokenline_requests"].labels
GEN_AI = METRICS["gen_ai_server_request_duration_seconds"].labels
LABELS = {
    ("hop",): "hop",
    ("hop", "gpu"): "hop, gpu",
    REQUEST: "request",
    (*REQUEST, "error_type"): "request, error_type",
    GEN_AI: "request, gen_ai",
}


def row(metric: Metric) -> tuple[str, ...]:
    return metric.kind, metric.unit, LABELS[metric.labels], metric.description


def test_the_docs_have_the_table() -> None:
    assert documented() == {exported_name(metric): row(metric) for metric in METRICS.values()}


def test_the_docs_have_the_edges() -> None:
    text = DOCS.read_text()
    for metric in METRICS.values():
        if metric.kind == "histogram":
            edges = ", ".join(f"{edge:g}" for edge in metric.edges)
            assert f"- `{metric.name}`: {edges}\n" in text, f"- `{metric.name}`: {edges}"


def test_the_docs_name_every_label() -> None:
    text = DOCS.read_text()
    for label in {label for metric in METRICS.values() for label in metric.labels}:
        assert f"`{label}`" in text, label
