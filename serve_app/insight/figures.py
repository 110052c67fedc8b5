"""What the live page shows, as JSON: what `view.py` and `page.html` agree on. Times in seconds; null is unknown."""

import msgspec

from serve_app.messages import GpuReport, LoadReport
from serve_app.telemetry.percentiles import Percentiles


class Figures(msgspec.Struct, frozen=True):
    """Base of everything on the page."""


class StageName(Figures, frozen=True):
    """A stage, in the order of a request's path, and the hop that it belongs to; `unaccounted` belongs to none."""

    name: str
    hop: str | None


class Bucket(Figures, frozen=True):
    """The requests of one length of prompt, or of `all`.

    requests: how many ended. served: how many of them had any work done; the rest of the bucket is theirs.
    seconds: each stage's, of their summed E2E, and `shares` of the same, which add up to 1.
    """

    length: str
    requests: int
    served: int
    seconds: dict[str, float]
    shares: dict[str, float]
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    e2e_s: Percentiles | None


class Series(Figures, frozen=True):
    """One value for each whole bin of `bin_s`, oldest first; `begins_s` are wall-clock times.

    Tokens and errors count when their request ends.
    """

    bin_s: float
    begins_s: list[float]
    requests_per_s: list[float | None]
    completion_tokens_per_s: list[float | None]
    errors_per_s: list[float | None]
    ttft_p50_s: list[float | None]
    ttft_p95_s: list[float | None]


class Recent(Figures, frozen=True):
    """The mean of the last 10 s."""

    requests_per_s: float | None
    completion_tokens_per_s: float | None
    errors_per_s: float | None


class EngineFigures(Figures, frozen=True):
    """One replica of an engine; the lists go with `Series.begins_s` and have the highest value of each bin.

    load: its latest; null once it has been silent for 30 s.
    prefix_hit_share: of the prompt tokens that were looked up in the prefix cache since its start, those found there.
    """

    hop: str
    replica: str
    load: LoadReport | None
    prefix_hit_share: float | None
    running: list[int | None]
    waiting: list[int | None]
    kv_usage: list[float | None]


class HopFigures(Figures, frozen=True):
    """All replicas of one hop, summed. Spans count from each replica's start."""

    hop: str
    replicas: int
    in_flight: int
    queued: int
    exported_spans: int
    dropped_spans: int


class GpuFigures(Figures, frozen=True):
    """One GPU of one replica."""

    hop: str
    replica: str
    gpu: GpuReport


class SpanFigures(Figures, frozen=True):
    """A stage of one request. `begin_s` is from the request's arrival, `pieces` lie from there too.

    duration_s: from its begin to its end. busy_s: the sum of its `count` pieces, of which `pieces` are the longest.
    """

    name: str
    begin_s: float
    duration_s: float
    busy_s: float
    count: int
    longest_s: float
    pieces: list[tuple[float, float]]


class RequestFigures(Figures, frozen=True):
    """One request for its waterfall.

    spans: in the order of their begin; the shortest, `spans_left_out` of them, are not there if there are very many.
    parts: seconds of each stage and of `unaccounted`, which add up to `e2e_s`.
    """

    request_id: str
    trace_id: str | None
    operation: str
    model: str
    stream: bool
    outcome: str
    status: int
    error: str | None
    tenant: str
    lane: str
    length: str
    arrived_s: float
    e2e_s: float
    ttft_s: float | None
    tpot_s: float | None
    longest_gap_s: float | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    choices: int
    parts: dict[str, float]
    spans: list[SpanFigures]
    spans_left_out: int


class TotalFigures(Figures, frozen=True):
    """Since `since_s`, whatever has been forgotten since. `dropped` requests ended and were never reported."""

    since_s: float | None
    requests: int
    prompt_tokens: int
    completion_tokens: int
    errors: dict[str, int]
    dropped: int


class View(Figures, frozen=True):
    """The page. `covered_s` is how much of `window_s` the requests that are remembered reach back.

    everything: all lengths together. outcomes, errors: of the requests that are remembered.
    """

    now_s: float
    window_s: float
    covered_s: float
    stages: list[StageName]
    totals: TotalFigures
    recent: Recent
    everything: Bucket
    buckets: list[Bucket]
    series: Series
    engines: list[EngineFigures]
    hops: list[HopFigures]
    gpus: list[GpuFigures]
    outcomes: dict[str, int]
    errors: dict[str, int]
    slowest: list[RequestFigures]
