"""From our config to vLLM's arguments. Pure: dictionaries only, so it is tested without importing vLLM."""

from typing import Any

from serve_app.config import EngineSection, ModelSection

GIB = 1 << 30


def vllm_args(model: ModelSection, engine: EngineSection, model_path: str, context_tokens: int) -> dict[str, Any]:
    """Keyword arguments of vLLM's `AsyncEngineArgs`; `engine.vllm_args` sets whatever is not set here."""
    args: dict[str, Any] = {
        "model": model_path,
        "served_model_name": model.name,
        "max_model_len": context_tokens,
        "trust_remote_code": model.trust_remote_code,
        "dtype": engine.dtype,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "distributed_executor_backend": _executor(engine),
        # Requests are logged by us, without their content.
        "enable_log_requests": False,
    }
    if engine.quantization is not None:
        args["quantization"] = engine.quantization
    if engine.max_sequences is not None:
        args["max_num_seqs"] = engine.max_sequences
    if engine.device == "cpu":
        args["kv_cache_memory_bytes"] = int(engine.kv_cache_gib * GIB)
    else:
        args["gpu_memory_utilization"] = engine.gpu_memory_utilization
    return args | engine.vllm_args


def _executor(engine: EngineSection) -> str | None:
    """None lets vLLM run a lone worker inside its engine process, without a process of its own."""
    if engine.executor == "mp" and engine.tensor_parallel_size * engine.pipeline_parallel_size == 1:
        return None
    return engine.executor
