"""vLLM's arguments from our configuration."""

from typing import Any

import pytest

from serve_app.config import EngineSection, ModelSection
from serve_app.engine.vllm_args import vllm_args


def arguments(model: dict[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    section = ModelSection(**({"name": "m", "source": "s"} | (model or {})))
    return vllm_args(section, EngineSection(**engine), "/folder", 512)


def test_the_defaults_are_one_gpu_without_a_process_of_its_own() -> None:
    assert arguments() == {
        "model": "/folder",
        "served_model_name": "m",
        "max_model_len": 512,
        "trust_remote_code": False,
        "dtype": "auto",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "distributed_executor_backend": None,
        "enable_log_requests": False,
        "gpu_memory_utilization": 0.9,
    }


def test_every_field_reaches_the_argument_of_its_meaning() -> None:
    made = arguments(
        model={"trust_remote_code": True},
        dtype="bfloat16",
        tensor_parallel_size=4,
        pipeline_parallel_size=2,
        gpu_memory_utilization=0.5,
        quantization="awq",
        max_sequences=64,
    )
    assert made["trust_remote_code"] is True
    assert (made["dtype"], made["quantization"], made["max_num_seqs"]) == ("bfloat16", "awq", 64)
    assert (made["tensor_parallel_size"], made["pipeline_parallel_size"]) == (4, 2)
    assert made["gpu_memory_utilization"] == 0.5


@pytest.mark.parametrize("name", ["quantization", "max_num_seqs"])
def test_what_is_not_set_is_left_to_vllm(name: str) -> None:
    assert name not in arguments()


@pytest.mark.parametrize(
    ("executor", "tensor", "pipeline", "backend"),
    [("mp", 1, 1, None), ("mp", 2, 1, "mp"), ("mp", 1, 2, "mp"), ("ray", 1, 1, "ray"), ("ray", 4, 2, "ray")],
)
def test_the_executor_is_the_configured_one_but_for_a_lone_worker(
    executor: str, tensor: int, pipeline: int, backend: str | None
) -> None:
    made = arguments(executor=executor, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    assert made["distributed_executor_backend"] == backend


def test_on_a_cpu_the_memory_for_kv_blocks_is_given_in_bytes_and_no_share_of_a_gpu() -> None:
    made = arguments(device="cpu", kv_cache_gib=0.5)
    assert made["kv_cache_memory_bytes"] == 512 * 1024 * 1024
    assert isinstance(made["kv_cache_memory_bytes"], int)
    assert "gpu_memory_utilization" not in made


def test_on_a_gpu_the_memory_for_kv_blocks_is_vllms_to_measure() -> None:
    assert "kv_cache_memory_bytes" not in arguments(device="gpu", kv_cache_gib=0.5)


def test_the_passthrough_adds_arguments_and_has_the_last_word() -> None:
    made = arguments(vllm_args={"enforce_eager": True, "enable_log_requests": True})
    assert made["enforce_eager"] is True
    assert made["enable_log_requests"] is True


def test_making_arguments_does_not_change_the_configuration() -> None:
    given = {"enforce_eager": True}
    arguments(vllm_args=given)["extra"] = 1
    assert given == {"enforce_eager": True}
