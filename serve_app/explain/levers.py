"""The table behind `tokenline explain`: each layer of a request's time, what time in it means, and what changes it.

A lever is a key of a Serve config file under `args` (`serve_app/config.py`); what stands under `engine.vllm_args` is a
field of vLLM's `AsyncEngineArgs`. Data only.
"""

from dataclasses import dataclass

from serve_app.telemetry import names


@dataclass(frozen=True, slots=True)
class Lever:
    """A config key, and what to do with it."""

    key: str
    advice: str


@dataclass(frozen=True, slots=True)
class Layer:
    """A stage, or `unaccounted`: the hop that it belongs to, and what it means when the wait is there."""

    name: str
    hop: str
    meaning: str
    levers: tuple[Lever, ...]


def _layer(name: str, hop: str, meaning: str, *levers: tuple[str, str]) -> Layer:
    return Layer(name, hop, meaning, tuple(Lever(key, advice) for key, advice in levers))


_VLLM = "engine.vllm_args."
# The way between two hops belongs to none of them.
BETWEEN = "between the hops"

LAYERS: dict[str, Layer] = {
    layer.name: layer
    for layer in (
        _layer(
            names.AUTH,
            "gateway",
            "the gateway checks who asks; this is microseconds unless its event loop is busy",
            ("gateway.replicas", "more gateway processes"),
            ("gateway.num_cpus", "reserve a whole CPU for each"),
        ),
        _layer(
            names.READ,
            "gateway",
            "the client is slow to deliver its request's body, or the body is large",
            ("gateway.body_timeout_s", "less: give up earlier on slow clients"),
            ("gateway.max_body_bytes", "less: refuse bodies that nobody needs"),
            ("gateway.replicas", "more, if the gateways' CPUs are full"),
        ),
        _layer(
            names.TOKENIZER_QUEUE,
            "tokenizer",
            "requests wait for a free thread of a tokenizer, behind other requests' template and encode",
            ("tokenizer.replicas", "more tokenizer processes"),
            ("tokenizer.max_replicas", "let autoscaling add some"),
            ("tokenizer.threads", "more texts at once in one process"),
            ("tokenizer.target_ongoing_requests", "less: autoscale earlier"),
        ),
        _layer(
            names.TEMPLATE,
            "tokenizer",
            "rendering the chat template: Python that holds the GIL, longer with every turn of a conversation",
            ("model.chat_template_path", "a simpler template in place of the model's own"),
            ("tokenizer.replicas", "more processes: threads do not help under the GIL"),
            ("tokenizer.num_cpus", "reserve a whole CPU for each"),
        ),
        _layer(
            names.ENCODE,
            "tokenizer",
            "turning text into ids, in proportion to the text's length",
            ("tokenizer.replicas", "more processes, if their CPUs are full"),
            ("tokenizer.num_cpus", "reserve a whole CPU for each"),
            ("tokenizer.threads", "fewer, if they compete for one CPU"),
            ("model.context_tokens", "less: refuse prompts longer than needed"),
        ),
        _layer(
            names.POSTPROCESS_QUEUE,
            "postprocess",
            "requests wait for a postprocess replica to take them",
            ("postprocess.replicas", "more postprocess processes"),
            ("postprocess.max_replicas", "let autoscaling add some"),
            ("postprocess.max_ongoing_requests", "more at once in one replica, if its CPU has room"),
        ),
        _layer(
            names.ENGINE_QUEUE,
            "engine",
            "the engine has more requests than it steps together: it is out of sequences or of KV blocks",
            ("engine.replicas", "more engines"),
            ("engine.max_replicas", "let autoscaling add some"),
            ("engine.max_sequences", "more sequences per step, while KV blocks last"),
            ("engine.gpu_memory_utilization", "more memory for KV blocks (engine.kv_cache_gib on the CPU)"),
            (_VLLM + "kv_cache_dtype", "fp8 holds twice the tokens in the same memory"),
        ),
        _layer(
            names.PREFILL,
            "engine",
            "the engine computes the prompt: bound by compute, in proportion to the prompt's uncached tokens",
            (_VLLM + "enable_prefix_caching", "true: a prefix seen before is not computed again"),
            (_VLLM + "enable_chunked_prefill", "true: prompts are computed beside running decodes"),
            (_VLLM + "max_num_batched_tokens", "more prompt tokens per step; decodes beside them get slower"),
            ("engine.tensor_parallel_size", "more GPUs per engine"),
            ("engine.quantization", "a method whose kernels compute in 8 bits"),
        ),
        _layer(
            names.KV_TRANSFER,
            "engine",
            "KV blocks travel from the engine that computed the prompt to the one that decodes",
            (_VLLM + "kv_transfer_config", "a faster connector, or one over NVLink or RDMA"),
            (_VLLM + "kv_cache_dtype", "fp8 halves the bytes that travel"),
        ),
        _layer(
            names.DECODE,
            "engine",
            "the engine makes tokens one by one: bound by memory bandwidth, slower with larger batches",
            ("engine.max_sequences", "fewer sequences per step: faster tokens, less throughput"),
            ("engine.quantization", "smaller weights: fewer bytes read per token"),
            ("engine.tensor_parallel_size", "more GPUs read the weights together"),
            (_VLLM + "speculative_config", "several tokens per step"),
            (_VLLM + "max_num_batched_tokens", "less: prompts of others interrupt decodes for shorter"),
            ("engine.replicas", "more engines: smaller batches in each"),
        ),
        _layer(
            names.DETOKENIZE,
            "postprocess",
            "turning ids into text and matching stop strings: CPU for every token",
            ("postprocess.replicas", "more postprocess processes"),
            ("postprocess.max_replicas", "let autoscaling add some"),
            ("postprocess.num_cpus", "reserve a whole CPU for each"),
            (_VLLM + "stream_interval", "more tokens per chunk: fewer calls"),
        ),
        _layer(
            names.RENDER,
            "postprocess",
            "making the bytes of SSE events or of the JSON body: CPU for every chunk",
            ("postprocess.replicas", "more postprocess processes"),
            ("postprocess.max_replicas", "let autoscaling add some"),
            (_VLLM + "stream_interval", "more tokens per chunk: fewer chunks to render"),
        ),
        _layer(
            names.WRITE,
            "gateway",
            "the response is given to the socket: the client reads slowly, or the gateway's event loop is busy",
            ("gateway.replicas", "more gateway processes"),
            ("gateway.num_cpus", "reserve a whole CPU for each"),
            (_VLLM + "stream_interval", "more tokens per chunk: fewer writes"),
        ),
        _layer(
            names.UNACCOUNTED,
            BETWEEN,
            "no stage was at work: the way between the hops, and event loops that wait for a CPU",
            ("gateway.replicas", "more gateway processes: every request and chunk crosses one"),
            ("postprocess.replicas", "more postprocess processes: every chunk crosses one"),
            ("gateway.num_cpus", "reserve what a gateway uses, so that the node is not overbooked"),
            (_VLLM + "stream_interval", "more tokens per chunk: fewer messages between the hops"),
        ),
    )
}
