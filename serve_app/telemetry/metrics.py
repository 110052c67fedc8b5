"""What a request, or a replica's report of itself, adds to our metrics (`metric_table.py`). Pure; knows nothing of Ray.

Every label has few values: a client's text never becomes one. What is unknown gives no observation, never a zero.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, get_args

from serve_app.errors import InternalError, RequestError
from serve_app.messages import GpuReport, HopReport, Operation, RequestMetrics
from serve_app.telemetry import names
from serve_app.telemetry.account import account
from serve_app.telemetry.metric_table import METRICS


@dataclass(frozen=True, slots=True)
class Observation:
    """A histogram's value, a gauge's, or what a counter grows by; `labels` are exactly those of the metric."""

    metric: str
    value: float
    labels: dict[str, str]


class Meter(Protocol):
    """Where observations go."""

    def record(self, observations: Sequence[Observation]) -> None:
        """Adds them to the metrics of this process."""


# A model or an operation that is none of ours.
UNKNOWN = "unknown"


def _codes(error: type[RequestError]) -> set[str]:
    """The codes of the tree under `error`."""
    own = {error.code} if "code" in vars(error) else set()
    return own.union(*map(_codes, error.__subclasses__()))


ERROR_TYPES = frozenset(_codes(RequestError) | {names.DISCONNECTED})


def of_request(request: RequestMetrics, served_model: str) -> list[Observation]:
    """What one ended request adds. Any other model than the served one is `unknown`, any other error an internal one.

    Recorded by the gateway that had it. `error_type` is empty without an error, which Prometheus reads as absent.
    """
    what = account(request)
    labels = _request_labels(request, served_model, what.length)
    observations = _observe(
        labels,
        gen_ai_server_request_duration_seconds=what.e2e_s,
        gen_ai_server_time_to_first_token_seconds=what.ttft_s,
        gen_ai_server_time_per_output_token_seconds=what.tpot_s,
        tokenline_longest_token_gap_seconds=what.longest_gap_s,
        tokenline_requests=1,
        tokenline_errors=None if request.error is None else 1,
        tokenline_prompt_tokens=request.prompt_tokens,
        tokenline_completion_tokens=request.completion_tokens,
        tokenline_cached_prompt_tokens=request.cached_tokens,
    )
    for stage, seconds in what.parts.items():
        at = labels | {"hop": stage}
        observations += _observe(at, tokenline_stage_duration_seconds=seconds, tokenline_stage_seconds=seconds)
    return observations


def of_report(report: HopReport, before: HopReport | None) -> list[Observation]:
    """A replica's gauges now, and what its counters grew by since its report `before`.

    None is before the first: then its counters are observed at 0 too, so that they are there before they grow, which
    Prometheus' `rate` needs to see the first growth.
    Recorded by the replica itself, so that Ray Serve's labels name it. Its `requests` are for `of_request`.
    """
    observations = _observe({"hop": report.hop}, tokenline_in_flight=report.in_flight, tokenline_queued=report.queued)
    if report.load is not None:
        observations += _observe(
            {"hop": report.hop},
            tokenline_engine_running=report.load.running,
            tokenline_engine_waiting=report.load.waiting,
            tokenline_engine_kv_usage=report.load.kv_usage,
            tokenline_engine_kv_blocks=report.load.kv_blocks,
        )
    counts, counted = _counts(report), _counts(before)
    # A count that fell is of a process that began anew.
    grown = {name: now - counted.get(name, 0) if now >= counted.get(name, 0) else now for name, now in counts.items()}
    observations += _observe({"hop": report.hop}, before is None, **grown)
    return observations + [one for gpu in report.gpus for one in _of_gpu(report.hop, gpu)]


def _of_gpu(hop: str, gpu: GpuReport) -> list[Observation]:
    return _observe(
        {"hop": hop, "gpu": str(gpu.index)},
        tokenline_gpu_compute_ratio=gpu.compute,
        tokenline_gpu_memory_bandwidth_ratio=gpu.memory_bandwidth,
        tokenline_gpu_memory_used_bytes=gpu.used_bytes,
        tokenline_gpu_memory_total_bytes=gpu.total_bytes,
        tokenline_gpu_memory_peak_bytes=gpu.peak_bytes,
        tokenline_gpu_memory_mean_bytes=gpu.mean_bytes,
    )


def _counts(report: HopReport | None) -> dict[str, int]:
    """The counters in a report, since the start of its process."""
    if report is None:
        return {}
    counts = {
        "tokenline_exported_spans": report.exported_spans,
        "tokenline_dropped_spans": report.dropped_spans,
        "tokenline_dropped_requests": report.dropped_requests,
    }
    if report.load is not None:
        counts["tokenline_engine_preemptions"] = report.load.preemptions
        counts["tokenline_engine_prefix_query_tokens"] = report.load.prefix_queries_tokens
        counts["tokenline_engine_prefix_hit_tokens"] = report.load.prefix_hits_tokens
    return counts


def _request_labels(request: RequestMetrics, served_model: str, length: names.Length) -> dict[str, str]:
    model = served_model if request.model == served_model else UNKNOWN
    return {
        "hop": names.GATEWAY,
        "model": model,
        "length": length,
        "kind": "stream" if request.stream else "whole",
        "outcome": _one_of(names.OUTCOMES, request.outcome, "error"),
        "error_type": "" if request.error is None else _one_of(ERROR_TYPES, request.error, InternalError.code),
        "gen_ai_operation_name": _one_of(get_args(Operation), request.operation, UNKNOWN),
        "gen_ai_provider_name": names.PROVIDER,
        "gen_ai_request_model": model,
        "gen_ai_response_model": model if request.completion_tokens else "",
    }


def _one_of(known: Collection[str], value: str, otherwise: str) -> str:
    return value if value in known else otherwise


def _observe(labels: dict[str, str], with_zeros: bool = False, /, **values: float | None) -> list[Observation]:
    """The values that are known, each with its metric's labels; a counter does not grow by nothing."""
    observations = []
    # Many metrics have the same labels, and a request has dozens of values.
    shared: dict[tuple[str, ...], dict[str, str]] = {}
    for name, value in values.items():
        metric = METRICS[name]
        if value is None or (metric.kind == "counter" and value <= 0 and not with_zeros):
            continue
        if metric.labels not in shared:
            shared[metric.labels] = {label: labels[label] for label in metric.labels}
        observations.append(Observation(name, value, shared[metric.labels]))
    return observations
