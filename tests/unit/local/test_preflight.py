"""What is refused before anything starts."""

import json
import socket
from pathlib import Path

import pytest

from serve_app.config import load
from serve_app.errors import ConfigError
from serve_app.local import preflight
from serve_app.local.preflight import GIB

ARGS = {"model": {"name": "m", "source": "somewhere"}}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    return str(tmp_path)


@pytest.mark.parametrize(("dtype", "weights"), [("auto", 1000), ("bfloat16", 1000), ("float32", 2000)])
def test_memory_counts_weights_in_the_served_dtype_for_each_replica(dtype: str, weights: int, model: str) -> None:
    engine = {"device": "cpu", "dtype": dtype, "kv_cache_gib": 2, "replicas": 3}
    config = load(ARGS | {"engine": engine})
    assert preflight.needed_memory_bytes(config, model) == 3 * (weights + 2 * GIB) + 3 * GIB


@pytest.mark.parametrize("engine", [{"kind": "sim"}, {"device": "gpu"}])
def test_engines_without_weights_in_main_memory_need_no_check(engine: dict[str, str], model: str) -> None:
    preflight.check_memory(load(ARGS | {"engine": engine}), model, available_bytes=1)


def test_too_little_memory_says_how_much_there_is_and_how_much_is_needed(model: str) -> None:
    config = load(ARGS | {"engine": {"device": "cpu", "kv_cache_gib": 4}})
    with pytest.raises(ConfigError, match=r"about 7\.0 GiB .* 2\.5 GiB are available.*engine\.kv_cache_gib"):
        preflight.check_memory(config, model, available_bytes=int(2.5 * GIB))


def test_a_hub_id_counts_without_its_weights() -> None:
    config = load(ARGS | {"engine": {"device": "cpu", "kv_cache_gib": 1}})
    assert preflight.needed_memory_bytes(config, "Qwen/Qwen3-8B") == 4 * GIB


def test_a_containers_limit_counts_where_it_is_lower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_CGROUP", tmp_path)
    machine = preflight.available_memory_bytes()
    (tmp_path / "memory.current").write_text("400\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert preflight.available_memory_bytes() == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert preflight.available_memory_bytes() > machine / 2


def test_a_port_shared_by_so_reuseport_is_taken() -> None:
    with socket.socket() as proxy:
        proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        proxy.bind(("127.0.0.1", 0))
        proxy.listen()
        with pytest.raises(ConfigError, match="is taken"):
            preflight.check_port("127.0.0.1", proxy.getsockname()[1])
