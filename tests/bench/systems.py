"""The systems that are compared: each is started, gives its URL, and is ended with all its processes.

All serve one model folder with the same engine settings, and those that stand on Ray get the same variables, so that
only the serving differs. One difference stays: Ray Serve LLM 2.60 needs vLLM 0.29. With all of them vLLM's worker is a
process of its own: Ray Serve LLM asks for that, and vLLM 0.32 does it on a CPU by itself (read in `platforms/cpu.py`).
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from bench import processes

from serve_app.launch import serving
from serve_app.local import environment
from serve_app.local.ports import free_ports
from serve_app.local.processes import TAG
from serve_app.local.servefile import DEFAULT_CONFIG

ROOT = Path(__file__).parents[2]
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
MODEL = "one-layer"
CONTEXT_TOKENS = 2048
MAX_SEQUENCES = 64
MAX_BATCHED_TOKENS = 4096
KV_CACHE_BYTES = 1 << 30
_READY_S = 600.0
_POLL_S = 0.5
_VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
# Set for Tokenline's own log, which is quiet; Ray Serve LLM writes lines for every request, and buffers them if let.
_OWN_LOGGING = ("RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE", "RAY_SERVE_LOG_TO_STDERR")


class NotReady(Exception):
    """A system that did not start; the message names its log."""


@dataclass(frozen=True)
class System:
    """A running system. root: its first process, whose session the others share."""

    url: str
    model: str
    run_id: str
    root: int


Start = Callable[[Path], AbstractContextManager[System]]


@contextlib.contextmanager
def tokenline(log: Path, config: Path, overrides: Mapping[str, Any]) -> Iterator[System]:
    """This project, as `tokenline run` serves it."""
    with contextlib.ExitStack() as after, serving(config, port=0, overrides=overrides, log=log) as service:
        system = System(service.url, service.model, service.run_id, service.pid)
        try:
            yield system
        finally:
            # Looked up while they live: an orphan of another session is found by its parent alone.
            after.callback(_end, system, processes.members(system.run_id, system.root))


def one_layer_tokenline(model: Path, overrides: Mapping[str, Any]) -> Start:
    """Tokenline on vLLM with the settings of all."""
    changes = {
        "model": {"name": MODEL, "source": str(model), "context_tokens": CONTEXT_TOKENS},
        "engine": {
            "dtype": "float32",
            "max_sequences": MAX_SEQUENCES,
            "kv_cache_gib": KV_CACHE_BYTES / (1 << 30),
            "vllm_args": {
                "enforce_eager": True,
                "max_num_batched_tokens": MAX_BATCHED_TOKENS,
                "enable_prefix_caching": True,
            },
        },
        **overrides,
    }
    return lambda log: tokenline(log, DEFAULT_CONFIG, changes)


@contextlib.contextmanager
def vllm(log: Path, model: Path) -> Iterator[System]:
    """vLLM's own API server, of the application's environment."""
    (port,) = free_ports(1)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(model), "--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(MAX_SEQUENCES)),
        *("--max-num-batched-tokens", str(MAX_BATCHED_TOKENS), "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
        *("--distributed-executor-backend", "mp", "--enable-prefix-caching", "--disable-uvicorn-access-log"),
    ]
    with _child(command, {TAG: uuid.uuid4().hex, **_VLLM}, log, port) as system:
        yield system


@contextlib.contextmanager
def ray_llm(log: Path, model: Path, direct_streaming: bool) -> Iterator[System]:
    """Ray Serve LLM with HAProxy and throughput mode, of the peers' environment."""
    (port,) = free_ports(1)
    folder = environment.new_folder()
    engine = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": CONTEXT_TOKENS,
        "max_num_seqs": MAX_SEQUENCES,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "enable_prefix_caching": True,
    }
    script = str(Path(__file__).with_name("ray_llm.py"))
    command = [str(PEERS_PYTHON), script, str(model), MODEL, str(port), str(folder), json.dumps(engine)]
    variables = environment.child_environment(os.environ, uuid.uuid4().hex, folder) | _VLLM
    for name in _OWN_LOGGING:
        del variables[name]
    variables["RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING"] = str(int(direct_streaming))
    try:
        with _child(command, variables, log, port) as system:
            yield system
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _child(command: list[str], variables: Mapping[str, str], log: Path, port: int) -> Iterator[System]:
    """The system that a command starts, once it has answered a chat."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,  # it ends with us, however we end
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for us alone; we end the others in order
        )
    system = System(f"http://127.0.0.1:{port}", MODEL, variables[TAG], process.pid)
    try:
        _await_chat(system, process, log)
        yield system
    finally:
        _end(system, processes.members(system.run_id, system.root))
        process.wait()


def _await_chat(system: System, process: "subprocess.Popen[bytes]", log: Path) -> None:
    body = {"model": system.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    end_s = time.monotonic() + _READY_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise NotReady(f"it ended with status {process.returncode}; its log is {log}")
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.post(f"{system.url}/v1/chat/completions", json=body, timeout=30)
            if answer.status_code == 200:
                return
        time.sleep(_POLL_S)
    raise NotReady(f"it answered no chat within {_READY_S:.0f} s; its log is {log}")


def _end(system: System, known: list[Any]) -> None:
    """However often Ctrl-C comes, no process is left behind."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            if left := processes.end(system.run_id, system.root, known):
                print(f"bench: could not end {', '.join(left)}", file=sys.stderr)  # noqa: T201
            return
