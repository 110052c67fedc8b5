"""AppConfig: one frozen section per hop, each field with its unit and bounds; unknown keys are refused by name.

It is what stands under `args` in a Serve config file (`serve_app/configs/`). Names end in their unit. The only free
dictionary is `engine.vllm_args`, passed to vLLM as it is. This module reads dictionaries; it knows nothing of files,
Ray or vLLM.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from serve_app.complaint import read
from serve_app.errors import ConfigError

Count = Annotated[int, Meta(ge=1, le=100_000)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Cpus = Annotated[float, Meta(ge=0, le=1024)]
Share = Annotated[float, Meta(gt=0, le=1)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every section."""


class Hop(Section, frozen=True, kw_only=True):
    """What every deployment has.

    replicas: processes at the start, and the least that autoscaling keeps.
    max_replicas: processes that autoscaling may reach; None keeps `replicas` fixed.
    target_ongoing_requests: requests per replica that autoscaling aims at.
    num_cpus: logical CPUs Ray reserves per replica; fractions let all hops start on a small machine.
    max_ongoing_requests: requests one replica works on at once; more wait at the caller.
    max_queued_requests: requests that may wait at one caller; beyond it they are refused with 429.
    """

    replicas: Count = 1
    max_replicas: Count | None = None
    target_ongoing_requests: Annotated[float, Meta(gt=0, le=100_000)] = 64.0
    num_cpus: Cpus = 1.0
    max_ongoing_requests: Count = 256
    max_queued_requests: Count = 1024


class ModelSection(Section, frozen=True, kw_only=True):
    """Which model, for every hop.

    name: how clients call it.
    source: `embedded:smollm2-135m-instruct` (see `make model`), a folder, or a hub id.
    context_tokens: longest prompt plus completion in tokens; None takes the model's own limit.
    chat_template_path: a Jinja file to use in place of the model's own chat template.
    trust_remote_code: run Python code that comes with the model. Off, because it is code of others.
    """

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    source: Annotated[str, Meta(min_length=1)]
    context_tokens: Annotated[int, Meta(ge=2, le=100_000_000)] | None = None
    chat_template_path: str | None = None
    trust_remote_code: bool = False


class GatewaySection(Hop, frozen=True, kw_only=True):
    """The HTTP side.

    max_body_bytes: a larger request body is refused with 413.
    body_timeout_s: time a client has to deliver its body, else 408.
    request_timeout_s: a request's deadline, from arrival to last byte, else 504 (or an error event in a stream).
    max_choices: the most that `n` times the number of prompts may be.
    max_stops: the most stop strings one request may give.
    admin_key_file: a file whose content is the key that `/insight` asks for; None takes the environment's
    TOKENLINE_ADMIN_KEY, and without either `/insight` is open to whoever reaches the port.
    """

    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 4 << 20
    body_timeout_s: Seconds = 30.0
    request_timeout_s: Seconds = 600.0
    max_choices: Annotated[int, Meta(ge=1, le=1024)] = 128
    max_stops: Annotated[int, Meta(ge=1, le=64)] = 16
    admin_key_file: str | None = None


class TokenizerSection(Hop, frozen=True, kw_only=True):
    """The processes that render chat templates and tokenize.

    threads: items one replica works on at once. The tokenizer lets go of the GIL while it encodes, so a long text does
    not stop a short one.
    item_timeout_s: one item's limit; it fails alone.
    cache_mib: memory of one replica for the ids of messages it has seen, so that a conversation's next turn costs what
    is new in it; 0 remembers nothing.
    """

    # About what its threads hold: a tokenizer that has more than that is behind.
    target_ongoing_requests: Annotated[float, Meta(gt=0, le=100_000)] = 4.0
    threads: Annotated[int, Meta(ge=1, le=64)] = 4
    item_timeout_s: Seconds = 5.0
    cache_mib: Annotated[float, Meta(ge=0, le=65_536)] = 64.0


class PostprocessSection(Hop, frozen=True, kw_only=True):
    """The processes that detokenize, match stop strings and render.

    stream_coalesce_tokens: tokens of a choice that are sent to a streaming client together, for networks on which every
    packet costs; the first is sent at once. 1 sends each as it comes.
    """

    stream_coalesce_tokens: Annotated[int, Meta(ge=1, le=1024)] = 1


class SimSection(Section, frozen=True, kw_only=True):
    """The simulated engine: rates, sizes and faults.

    source: `hash` gives ids that depend on the prompt alone; `echo` repeats the prompt's ids, so that a stream carries
    its own marker.
    prefill_tokens_per_s: prompt tokens per second, one prompt after the other.
    step_ms, step_ms_per_sequence: a step of b sequences lasts step_ms + b * step_ms_per_sequence.
    max_sequences: sequences that step together; the rest wait.
    kv_blocks, block_tokens: KV blocks there are, and tokens per block.
    fail_after_tokens: each request fails after so many tokens; None never.
    die_after_tokens: the engine dies after so many tokens in all; None never.
    stall_after_tokens: each request stops making progress after so many tokens; None never.
    """

    source: Literal["hash", "echo"] = "hash"
    prefill_tokens_per_s: Annotated[float, Meta(gt=0)] = 20_000.0
    step_ms: Annotated[float, Meta(ge=0, le=60_000)] = 20.0
    step_ms_per_sequence: Annotated[float, Meta(ge=0, le=60_000)] = 0.1
    max_sequences: Count = 256
    kv_blocks: Annotated[int, Meta(ge=1)] = 8192
    block_tokens: Annotated[int, Meta(ge=1, le=4096)] = 16
    fail_after_tokens: Annotated[int, Meta(ge=0)] | None = None
    die_after_tokens: Annotated[int, Meta(ge=0)] | None = None
    stall_after_tokens: Annotated[int, Meta(ge=0)] | None = None


class EngineSection(Hop, frozen=True, kw_only=True):
    """The engines.

    kind: `vllm`, or `sim` for rates and faults (never for answers).
    device: where vLLM runs. On `cpu` a replica takes no GPU, whatever the parallel sizes are.
    dtype: weights and activations; `auto` takes the model's own.
    tensor_parallel_size, pipeline_parallel_size: their product is the number of GPUs of one replica.
    executor: `mp` keeps a replica's workers on one node, `ray` may spread them over nodes of its placement group.
    gpu_memory_utilization: share of each GPU's memory that vLLM may fill.
    kv_cache_gib: memory for KV blocks on the CPU, in GiB.
    quantization: vLLM's name of the method; None reads it from the model.
    max_sequences: sequences that vLLM steps together (`max_num_seqs`); None leaves vLLM's own.
    vllm_args: passed to vLLM's `AsyncEngineArgs` as they are, and checked there.
    environment: variables set in the replica before vLLM is imported.
    """

    kind: Literal["vllm", "sim"] = "vllm"
    device: Literal["cpu", "gpu"] = "gpu"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=256)] = 1
    pipeline_parallel_size: Annotated[int, Meta(ge=1, le=256)] = 1
    executor: Literal["mp", "ray"] = "mp"
    gpu_memory_utilization: Share = 0.9
    kv_cache_gib: Annotated[float, Meta(gt=0, le=4096)] = 1.0
    quantization: str | None = None
    max_sequences: Count | None = None
    vllm_args: dict[str, Any] = {}
    environment: dict[str, str] = {}
    sim: SimSection = msgspec.field(default_factory=SimSection)


class ChannelSection(Section, frozen=True, kw_only=True):
    """The token channel: how what the engines make comes back through postprocess to the gateway.

    enabled: off, each request has a stream of Ray Serve's for itself on each hop, which costs several times as much. It
    is off too where RAY_USE_TLS=1, because the channel's connections are not encrypted.
    max_backlog_items: pieces (one per engine step and choice) of one answer that may wait for who reads them: in the
    gateway for a slow client, in a replica for a slow hop. Past that the request ends with `backlog_full`.
    """

    enabled: bool = True
    max_backlog_items: Annotated[int, Meta(ge=16, le=10_000_000)] = 8192


class InsightSection(Section, frozen=True, kw_only=True):
    """The one process that remembers the latest requests, for `/insight` and `tokenline explain`. Nothing waits for it.

    num_cpus: logical CPUs Ray reserves for it.
    max_requests: the most requests it remembers, about 2 kB each.
    window_s: how long it remembers one.
    """

    num_cpus: Cpus = 0.1
    max_requests: Annotated[int, Meta(ge=1, le=100_000)] = 10_000
    window_s: Annotated[float, Meta(ge=10, le=86_400)] = 900.0


class TracingSection(Section, frozen=True, kw_only=True):
    """OpenTelemetry. What is None here is taken from the standard `OTEL_*` variables.

    endpoint: where spans go, as OTLP: `http://jaeger:4317` (gRPC) or `http://jaeger:4318` (HTTP). Without one here and
    in OTEL_EXPORTER_OTLP_ENDPOINT no span is made.
    protocol: `grpc` or `http/protobuf`; None takes OTEL_EXPORTER_OTLP_PROTOCOL, else `grpc`.
    sample_ratio: share of the traces begun here that are recorded, 0 to 1; a client's `traceparent` decides for its
    own. None takes OTEL_TRACES_SAMPLER, else all are recorded.
    capture_content: put prompts and completions on spans. Off, because they are the users'.
    max_queued_spans: spans that wait for export in one process; more are dropped and counted.
    """

    endpoint: Annotated[str, Meta(pattern="^https?://")] | None = None
    protocol: Literal["grpc", "http/protobuf"] | None = None
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] | None = None
    capture_content: bool = False
    max_queued_spans: Annotated[int, Meta(ge=512, le=1_000_000)] = 4096


class DelaysSection(Section, frozen=True, kw_only=True):
    """Deliberate delays, in milliseconds, once per request: to see where they show up. Only with `engine.kind: sim`.

    template_ms: before the chat template is rendered.
    encode_ms: before the prompt is encoded.
    engine_queue_ms: before the engine queues the request.
    prefill_ms: added to the prefill.
    detokenize_ms: before the first token becomes text.
    write_ms: before the first byte of the response's body is written.
    """

    template_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0.0
    encode_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0.0
    engine_queue_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0.0
    prefill_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0.0
    detokenize_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0.0
    write_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0.0


class AppConfig(Section, frozen=True, kw_only=True):
    """Everything the application can be told."""

    model: ModelSection
    gateway: GatewaySection = msgspec.field(default_factory=GatewaySection)
    tokenizer: TokenizerSection = msgspec.field(default_factory=TokenizerSection)
    engine: EngineSection = msgspec.field(default_factory=EngineSection)
    postprocess: PostprocessSection = msgspec.field(default_factory=PostprocessSection)
    channel: ChannelSection = msgspec.field(default_factory=ChannelSection)
    insight: InsightSection = msgspec.field(default_factory=InsightSection)
    tracing: TracingSection = msgspec.field(default_factory=TracingSection)
    delays: DelaysSection = msgspec.field(default_factory=DelaysSection)


# Arguments that have a field of their own, or that the token path fixes: given twice they would contradict each other.
_OWN_VLLM_ARGS = {
    "model": "model.source",
    "served_model_name": "model.name",
    "max_model_len": "model.context_tokens",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "engine.dtype",
    "quantization": "engine.quantization",
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "pipeline_parallel_size": "engine.pipeline_parallel_size",
    "distributed_executor_backend": "engine.executor",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "max_num_seqs": "engine.max_sequences",
    "tokenizer": "model.source",
    "kv_cache_memory_bytes": "engine.kv_cache_gib",
    # Each would start workers that no GPU is reserved for.
    "data_parallel_size": "engine.replicas",
    "data_parallel_backend": "engine.replicas",
    "prefill_context_parallel_size": "engine.tensor_parallel_size",
    "nnodes": "engine.executor",
}


def load(args: Mapping[str, Any]) -> AppConfig:
    """The `args` of a Serve config file, checked. Raises ConfigError that names the key."""
    try:
        config = msgspec.convert(args, AppConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error))) from None
    for hop in ("gateway", "tokenizer", "engine", "postprocess"):
        section: Hop = getattr(config, hop)
        if section.max_replicas is not None and section.max_replicas < section.replicas:
            raise ConfigError(
                f"{hop}.max_replicas: {section.max_replicas} is less than {hop}.replicas, {section.replicas}"
            )
    if config.engine.kind != "sim" and config.delays != DelaysSection():
        raise ConfigError("delays: only with engine.kind sim")
    for name in config.engine.vllm_args:
        if name in _OWN_VLLM_ARGS:
            raise ConfigError(f"engine.vllm_args.{name}: set {_OWN_VLLM_ARGS[name]} instead")
    return config


def _explain(sentence: str) -> str:
    """The key first, and for one that is unknown what may have been meant."""
    complaint = read(sentence)
    if complaint.unknown:
        known = _keys_of(complaint.section)
        near = difflib.get_close_matches(complaint.field.rpartition(".")[2], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        return f"{complaint.field}: unknown key; {hint}"
    if complaint.missing:
        return f"{complaint.field}: required, and missing"
    return f"{complaint.field or 'args'}: {complaint.reason}"


def _keys_of(path: str) -> list[str]:
    """The keys of the section at a dotted path; none where the path leaves the sections."""
    section: Any = AppConfig
    for step in filter(None, path.split(".")):
        fields = {field.name: field.type for field in msgspec.structs.fields(section)}
        section = fields.get(step)
        options = [section, *get_args(section)]
        section = next((one for one in options if isinstance(one, type) and issubclass(one, Section)), None)
        if section is None:
            return []
    return [field.name for field in msgspec.structs.fields(section)]
