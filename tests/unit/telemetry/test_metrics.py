"""What requests and reports add to the metrics: unknown is nothing, counters are differences, labels are bounded."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app import errors
from serve_app.messages import ChoiceMetrics, GpuReport, HopReport, LoadReport, RequestMetrics, Stage
from serve_app.telemetry import names
from serve_app.telemetry.metric_table import METRICS
from serve_app.telemetry.metrics import ERROR_TYPES, Observation, of_report, of_request

MODEL = "SmolLM2"
REQUEST = RequestMetrics(
    request_id="r1",
    operation="chat",
    model=MODEL,
    stream=True,
    arrived_s=100.0,
    ended_s=102.0,
    status=200,
    outcome="ok",
    first_write_s=100.5,
    stages=(
        Stage(names.TEMPLATE, 100.0, 100.25, 0.25),
        Stage(names.PREFILL, 100.25, 100.5, 0.25),
        Stage(names.DECODE, 100.5, 101.5, 1.0),
    ),
    choices=(ChoiceMetrics(5, 100.5, 101.5, 0.75), ChoiceMetrics(3, 100.5, 101.0, 0.25)),
    prompt_tokens=300,
    completion_tokens=8,
    cached_tokens=16,
)
REPORT = HopReport("engine", "engine#1", 0.0, in_flight=3, queued=0)
LOAD = LoadReport(2, 1, 0.25, 64, preemptions=4, prefix_queries_tokens=100, prefix_hits_tokens=32)


def changed(message: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(message, **fields)


def values(observations: Sequence[Observation], name: str) -> list[float]:
    return [one.value for one in observations if one.metric == name]


def value(observations: Sequence[Observation], name: str) -> float:
    (only,) = values(observations, name)
    return only


def metrics_in(observations: Sequence[Observation]) -> set[str]:
    return {one.metric for one in observations}


def test_a_requests_times_and_counts_are_observed() -> None:
    seen = of_request(REQUEST, MODEL)
    assert value(seen, "gen_ai_server_request_duration_seconds") == 2.0
    assert value(seen, "gen_ai_server_time_to_first_token_seconds") == 0.5
    assert value(seen, "gen_ai_server_time_per_output_token_seconds") == 1.5 / 6
    assert value(seen, "tokenline_longest_token_gap_seconds") == 0.75
    assert value(seen, "tokenline_requests") == 1
    assert value(seen, "tokenline_prompt_tokens") == 300
    assert value(seen, "tokenline_completion_tokens") == 8
    assert value(seen, "tokenline_cached_prompt_tokens") == 16
    assert values(seen, "tokenline_errors") == []


@pytest.mark.parametrize("name", ["tokenline_stage_duration_seconds", "tokenline_stage_seconds"])
def test_each_stage_has_its_part_and_the_parts_are_the_whole(name: str) -> None:
    parts = {one.labels["hop"]: one.value for one in of_request(REQUEST, MODEL) if one.metric == name}
    assert parts == {names.TEMPLATE: 0.25, names.PREFILL: 0.25, names.DECODE: 1.0, names.UNACCOUNTED: 0.5}


def test_a_requests_labels_say_what_it_was() -> None:
    (duration,) = [one for one in of_request(REQUEST, MODEL) if one.metric == "gen_ai_server_request_duration_seconds"]
    assert duration.labels == {
        "hop": "gateway",
        "model": MODEL,
        "length": "medium",
        "kind": "stream",
        "outcome": "ok",
        "error_type": "",
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "tokenline",
        "gen_ai_request_model": MODEL,
        "gen_ai_response_model": MODEL,
    }


def test_what_is_unknown_is_not_observed() -> None:
    bare = RequestMetrics("r1", "chat", "", False, 1.0, 2.0, 503, "refused", error="overloaded")
    seen = of_request(bare, MODEL)
    assert metrics_in(seen) == {
        "gen_ai_server_request_duration_seconds",
        "tokenline_stage_duration_seconds",
        "tokenline_stage_seconds",
        "tokenline_requests",
        "tokenline_errors",
    }
    assert {one.labels["length"] for one in seen} == {"unknown"}
    assert {one.labels["kind"] for one in seen} == {"whole"}
    assert all(one.labels.get("gen_ai_response_model", "") == "" for one in seen), "nothing answered"


def test_a_counter_does_not_grow_by_nothing() -> None:
    seen = of_request(changed(REQUEST, cached_tokens=0, completion_tokens=0), MODEL)
    assert values(seen, "tokenline_cached_prompt_tokens") == values(seen, "tokenline_completion_tokens") == []
    assert metrics_in(of_report(REPORT, REPORT)) == {"tokenline_in_flight", "tokenline_queued"}


def test_a_replicas_first_report_has_its_counters_at_zero() -> None:
    for name in ("tokenline_exported_spans", "tokenline_dropped_spans", "tokenline_dropped_requests"):
        assert value(of_report(REPORT, None), name) == 0


def test_a_gauge_of_zero_is_observed() -> None:
    assert value(of_report(REPORT, None), "tokenline_queued") == 0


def test_error_types_are_the_trees_codes_and_the_departed_client() -> None:
    of_classes = {
        one.code
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, errors.RequestError) and one is not errors.RequestError
    }
    assert of_classes | {names.DISCONNECTED} == ERROR_TYPES


@pytest.mark.parametrize("code", sorted(ERROR_TYPES))
def test_each_known_error_is_counted_under_its_code(code: str) -> None:
    (counted,) = [one for one in of_request(changed(REQUEST, error=code), MODEL) if one.metric == "tokenline_errors"]
    assert (counted.value, counted.labels["error_type"]) == (1, code)


BOUNDS = {
    "hop": {names.GATEWAY, names.UNACCOUNTED, *names.STAGES},
    "model": {MODEL, "unknown"},
    "length": set(names.LENGTHS),
    "kind": {"stream", "whole"},
    "outcome": set(names.OUTCOMES),
    "error_type": {"", *ERROR_TYPES},
    "gen_ai_operation_name": {"chat", "text_completion", "tokenize", "detokenize", "unknown"},
    "gen_ai_provider_name": {"tokenline"},
    "gen_ai_request_model": {MODEL, "unknown"},
    "gen_ai_response_model": {MODEL, "unknown", ""},
}


@given(
    texts=st.tuples(*[st.text()] * 6),
    error=st.none() | st.text(),
    tokens=st.none() | st.integers(0, 1 << 40),
    stream=st.booleans(),
)
def test_nothing_that_a_client_may_send_makes_a_new_label_value(
    texts: tuple[str, ...], error: str | None, tokens: int | None, stream: bool
) -> None:
    request_id, model, operation, outcome, tenant, lane = texts
    request = changed(
        REQUEST,
        request_id=request_id,
        model=model,
        operation=operation,
        outcome=outcome,
        tenant=tenant,
        lane=lane,
        error=error,
        prompt_tokens=tokens,
        stream=stream,
    )
    for one in of_request(request, MODEL):
        assert tuple(one.labels) == METRICS[one.metric].labels
        for label, said in one.labels.items():
            assert said in BOUNDS[label], f"{label}={said!r}"


def test_an_unknown_error_is_an_internal_one() -> None:
    seen = of_request(changed(REQUEST, error="KeyError: 'secret'", outcome="error"), MODEL)
    assert {one.labels["error_type"] for one in seen if "error_type" in one.labels} == {"internal_error"}


def test_an_engines_load_is_observed() -> None:
    seen = of_report(changed(REPORT, load=LOAD), None)
    assert {one.metric: one.value for one in seen} == {
        "tokenline_in_flight": 3,
        "tokenline_queued": 0,
        "tokenline_engine_running": 2,
        "tokenline_engine_waiting": 1,
        "tokenline_engine_kv_usage": 0.25,
        "tokenline_engine_kv_blocks": 64,
        "tokenline_exported_spans": 0,
        "tokenline_dropped_spans": 0,
        "tokenline_dropped_requests": 0,
        "tokenline_engine_preemptions": 4,
        "tokenline_engine_prefix_query_tokens": 100,
        "tokenline_engine_prefix_hit_tokens": 32,
    }
    assert all(one.labels == {"hop": "engine"} for one in seen)


def test_a_counter_grows_by_the_difference_to_the_report_before() -> None:
    before = changed(REPORT, exported_spans=10, dropped_spans=1, dropped_requests=2, load=LOAD)
    now = changed(before, exported_spans=17, load=changed(LOAD, prefix_queries_tokens=150))
    seen = of_report(now, before)
    assert value(seen, "tokenline_exported_spans") == 7
    assert value(seen, "tokenline_engine_prefix_query_tokens") == 50
    assert "tokenline_dropped_spans" not in metrics_in(seen)
    assert "tokenline_engine_preemptions" not in metrics_in(seen)


def test_a_count_that_fell_is_of_a_process_that_began_anew() -> None:
    before = changed(REPORT, exported_spans=100, dropped_spans=3)
    seen = of_report(changed(REPORT, exported_spans=4), before)
    assert value(seen, "tokenline_exported_spans") == 4
    assert values(seen, "tokenline_dropped_spans") == []


def test_an_engine_that_had_no_load_before_counts_from_its_start() -> None:
    assert value(of_report(changed(REPORT, load=LOAD), REPORT), "tokenline_engine_preemptions") == 4


def test_the_counts_of_many_reports_add_up_to_the_last() -> None:
    counts = [0, 5, 5, 12]
    reports = [changed(REPORT, exported_spans=count) for count in counts]
    steps = [of_report(now, before) for before, now in zip([None, *reports], reports, strict=False)]
    assert sum(sum(values(seen, "tokenline_exported_spans")) for seen in steps) == 12


def test_a_gpus_unreadable_values_are_absent_and_without_gpu_there_is_none() -> None:
    gpu = GpuReport(3, "GPU", 0.5, None, 10, 100, 20, None)
    seen = [one for one in of_report(changed(REPORT, gpus=(gpu,)), None) if one.metric.startswith("tokenline_gpu")]
    assert {one.metric: one.value for one in seen} == {
        "tokenline_gpu_compute_ratio": 0.5,
        "tokenline_gpu_memory_used_bytes": 10,
        "tokenline_gpu_memory_total_bytes": 100,
        "tokenline_gpu_memory_peak_bytes": 20,
    }
    assert all(one.labels == {"hop": "engine", "gpu": "3"} for one in seen)
    assert not any(one.metric.startswith("tokenline_gpu") for one in of_report(REPORT, None))


def test_only_histograms_have_edges_and_they_rise_from_above_zero() -> None:
    for metric in METRICS.values():
        assert (metric.kind == "histogram") == bool(metric.edges)
        assert list(metric.edges) == sorted(set(metric.edges))
        assert all(edge > 0 for edge in metric.edges), "Ray refuses others"


def test_the_duration_edges_are_those_that_opentelemetry_advises() -> None:
    edges = METRICS["gen_ai_server_request_duration_seconds"].edges
    assert edges == (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
