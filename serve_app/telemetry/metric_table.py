"""The table of every metric of ours: name, kind, unit, labels, bucket edges. Data only.

Names and bucket edges that start with `gen_ai_` are OpenTelemetry's for model servers (semantic conventions for
generative AI, status Development), written as Prometheus does. `docs/metrics.md` has the same table; a test compares.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "histogram", "gauge"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: `unit` is what one of its value is (`ratio`: 0 to 1), `edges` are a histogram's upper bounds."""

    name: str
    kind: Kind
    unit: str
    description: str
    labels: tuple[str, ...]
    edges: tuple[float, ...] = ()


_REQUEST = ("hop", "model", "length", "kind", "outcome", "gen_ai_operation_name")
_GEN_AI = (*_REQUEST, "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model", "error_type")
_ERRORS = (*_REQUEST, "error_type")
_HOP = ("hop",)
_GPU = ("hop", "gpu")

_DURATION = tuple(round(0.01 * 2**power, 2) for power in range(14))
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# From a short template's hundred microseconds to a long answer's minutes.
_STAGE = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


def _histogram(name: str, labels: tuple[str, ...], edges: tuple[float, ...], description: str) -> Metric:
    return Metric(name, "histogram", "s", description, labels, edges)


def _counter(name: str, labels: tuple[str, ...], unit: str, description: str) -> Metric:
    return Metric(name, "counter", unit, description, labels)


def _gauge(name: str, labels: tuple[str, ...], unit: str, description: str) -> Metric:
    return Metric(name, "gauge", unit, description, labels)


_TABLE = (
    _histogram("gen_ai_server_request_duration_seconds", _GEN_AI, _DURATION, "Arrival to last byte"),
    _histogram("gen_ai_server_time_to_first_token_seconds", _GEN_AI, _FIRST, "Arrival to first token"),
    _histogram("gen_ai_server_time_per_output_token_seconds", _GEN_AI, _TOKEN, "Mean time between a choice's tokens"),
    _histogram("tokenline_stage_duration_seconds", _REQUEST, _STAGE, "A stage's part of a request's wall time"),
    _counter("tokenline_stage_seconds", _REQUEST, "s", "The same parts, summed exactly"),
    _histogram("tokenline_longest_token_gap_seconds", _REQUEST, (*_TOKEN, 5.0, 10.0), "Longest wait between deltas"),
    _counter("tokenline_requests", _REQUEST, "requests", "Requests that have ended, however they ended"),
    _counter("tokenline_errors", _ERRORS, "requests", "Requests that ended in an error"),
    _counter("tokenline_prompt_tokens", _REQUEST, "tokens", "Prompt tokens of ended requests"),
    _counter("tokenline_completion_tokens", _REQUEST, "tokens", "Tokens generated for ended requests"),
    _counter("tokenline_cached_prompt_tokens", _REQUEST, "tokens", "Prompt tokens that the prefix cache had"),
    _gauge("tokenline_in_flight", _HOP, "requests", "Requests that a replica works on"),
    _gauge("tokenline_queued", _HOP, "requests", "Requests that wait inside a replica"),
    _counter("tokenline_exported_spans", _HOP, "spans", "Spans that were exported"),
    _counter("tokenline_dropped_spans", _HOP, "spans", "Spans that were lost before export"),
    _counter("tokenline_dropped_requests", _HOP, "requests", "Ended requests that never reached the history"),
    _gauge("tokenline_engine_running", _HOP, "sequences", "Sequences that the engine steps"),
    _gauge("tokenline_engine_waiting", _HOP, "sequences", "Sequences that wait in the engine"),
    _gauge("tokenline_engine_kv_usage", _HOP, "ratio", "Used share of the KV blocks"),
    _gauge("tokenline_engine_kv_blocks", _HOP, "blocks", "KV blocks that there are"),
    _counter("tokenline_engine_preemptions", _HOP, "preemptions", "Sequences put back for want of KV blocks"),
    _counter("tokenline_engine_prefix_query_tokens", _HOP, "tokens", "Prompt tokens looked up in the prefix cache"),
    _counter("tokenline_engine_prefix_hit_tokens", _HOP, "tokens", "Prompt tokens found in the prefix cache"),
    _gauge("tokenline_gpu_compute_ratio", _GPU, "ratio", "Share of time in which a kernel ran"),
    _gauge("tokenline_gpu_memory_bandwidth_ratio", _GPU, "ratio", "Share of time in which memory was accessed"),
    _gauge("tokenline_gpu_memory_used_bytes", _GPU, "bytes", "Memory in use"),
    _gauge("tokenline_gpu_memory_total_bytes", _GPU, "bytes", "Memory that there is"),
    _gauge("tokenline_gpu_memory_peak_bytes", _GPU, "bytes", "Most memory in use since the replica started"),
    _gauge("tokenline_gpu_memory_mean_bytes", _GPU, "bytes", "Mean memory in use since the replica started"),
)
METRICS = {metric.name: metric for metric in _TABLE}
