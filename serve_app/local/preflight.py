"""Owns what is checked before anything starts: the model is there, the port is free, the memory is enough.

Knows nothing of processes or Ray. Every refusal says what is there, what is needed, and how to change it.
"""

import contextlib
import json
from pathlib import Path

import psutil

from serve_app.config import AppConfig
from serve_app.errors import ConfigError
from serve_app.local.ports import is_free
from serve_app.local.servefile import ServeFile
from serve_app.model import locate

GIB = 1 << 30
# Ray's daemons, Serve's controller and proxy, and four replicas, of which each engine imports torch and vLLM.
_PROCESSES_BYTES = 3 * GIB
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_CGROUP = Path("/sys/fs/cgroup")


def check(file: ServeFile, available_bytes: int | None = None) -> None:
    """Raises ConfigError for the first thing that would keep `file` from being served on this machine.

    `available_bytes` stands in for the machine's free memory.
    """
    if file.config is not None:
        model = locate(file.config.model.source)
        check_memory(file.config, model, available_memory_bytes() if available_bytes is None else available_bytes)
    check_port(file.host, file.port)


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if something listens there already, or this user cannot listen there at all."""
    choose = "choose another: `make run PORT=…` (or `tokenline run --port …`)"
    try:
        free = is_free(host, port)
    except PermissionError as error:
        raise ConfigError(f"port {port} is not allowed to this user; {choose}") from error
    except OSError as error:
        raise ConfigError(f"http_options.host: {host!r} is no address of this machine ({error.strerror})") from error
    if not free:
        raise ConfigError(f"port {port} on {host} is taken; {choose}")


def check_memory(config: AppConfig, model: str, available_bytes: int) -> None:
    """Raises ConfigError if vLLM's engines on this machine's CPU would not fit into `available_bytes`."""
    needed = needed_memory_bytes(config, model)
    if needed > available_bytes:
        raise ConfigError(
            f"about {needed / GIB:.1f} GiB of memory are needed (engine.replicas: {config.engine.replicas}, each with "
            f"weights and {config.engine.kv_cache_gib:g} GiB of KV cache, and {_PROCESSES_BYTES / GIB:g} GiB for the "
            f"processes), and {available_bytes / GIB:.1f} GiB are available; end other programs, lower "
            "engine.kv_cache_gib, or take a smaller model"
        )


def needed_memory_bytes(config: AppConfig, model: str) -> int:
    """An estimate in bytes; 0 for engines that need none of this machine's memory worth asking for."""
    if config.engine.kind != "vllm" or config.engine.device != "cpu":
        return 0
    per_engine = _weights_bytes(Path(model), config.engine.dtype) + int(config.engine.kv_cache_gib * GIB)
    return per_engine * config.engine.replicas + _PROCESSES_BYTES


def available_memory_bytes() -> int:
    """What the machine can give without swapping, or less where a container's limit is lower."""
    available = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or no limit: the file says `max`
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        available = min(available, limit - used)
    return available


def _weights_bytes(folder: Path, dtype: str) -> int:
    """Size of the weights in memory; 0 for a hub id, whose size is not known before it is downloaded."""
    if not folder.is_dir():
        return 0
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    stored = stored or sum(file.stat().st_size for file in folder.glob("*.bin"))
    wanted, own = _DTYPE_BYTES.get(dtype), _DTYPE_BYTES.get(_stored_dtype(folder))
    return stored * wanted // own if wanted and own else stored


def _stored_dtype(folder: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        # transformers 5 writes `dtype`, older ones `torch_dtype`.
        return str(config.get("dtype") or config.get("torch_dtype"))
    return ""
