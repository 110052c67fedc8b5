"""A real Prometheus for a test: scrapes given endpoints every second, answers queries, ends with the `with` block."""

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from serve_app.local.ports import free_ports

_START_S = 30.0
_STOP_S = 10.0
_POLL_S = 0.1
_TOOLS = Path.home() / ".cache" / "tokenline" / "tools"


@dataclass(frozen=True)
class Series:
    """One series of an answer; `labels` are without the empty ones, which Prometheus does not keep."""

    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Prometheus:
    """A server that answers at `url`."""

    url: str

    def query(self, expression: str) -> list[Series]:
        """What a PromQL expression gives now. Raises AssertionError with Prometheus' own words for a wrong one."""
        result = self._get("query", {"query": expression})["result"]
        return [Series(one["metric"], float(one["value"][1])) for one in result]

    def value(self, expression: str) -> float | None:
        """The one value of an expression; None without any."""
        series = self.query(expression)
        assert len(series) <= 1, f"{expression} gives {len(series)} series"
        return series[0].value if series else None

    def names(self) -> set[str]:
        """Every metric that has a series."""
        return set(self._get("label/__name__/values", {}))

    def labels(self, name: str) -> set[str]:
        """The labels that any series of this metric has, and what Prometheus adds: `instance` and `job`."""
        found = self._get("series", {"match[]": name})
        return {label for series in found for label in series} - {"__name__"}

    def kind(self, name: str) -> str | None:
        """The type that the endpoint gives for this metric: counter, gauge or histogram."""
        # In the OpenMetrics format, which is what Prometheus asks for first, a counter's type stands without `_total`.
        described = self._get("metadata", {})
        found = described.get(name) or described.get(name.removesuffix("_total"))
        return found[0]["type"] if found else None

    def wait(self, expression: str, holds: Callable[[list[Series]], bool], limit_s: float) -> list[Series]:
        """Asks until the answer is as it should be, which takes a report of Ray's and a scrape."""
        end = time.monotonic() + limit_s
        while not holds(answer := self.query(expression)):
            assert time.monotonic() < end, f"after {limit_s:g} s {expression} still gives {answer}"
            time.sleep(_POLL_S)
        return answer

    def _get(self, path: str, parameters: dict[str, str]) -> Any:
        response = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=10, trust_env=False)
        answer = response.json()
        assert answer["status"] == "success", answer
        return answer["data"]


@contextmanager
def prometheus(*targets: str) -> Iterator[Prometheus]:
    """Scrapes the targets, each a URL like `http://127.0.0.1:29123/metrics`, inside the `with` block."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="tokenline-prometheus-") as folder, _process(Path(folder), targets, port):
        yield Prometheus(f"http://127.0.0.1:{port}")


@contextmanager
def _process(folder: Path, targets: Sequence[str], port: int) -> Iterator[None]:
    config, log = folder / "prometheus.json", folder / "prometheus.log"
    config.write_text(json.dumps(_configuration(targets)))  # JSON is YAML
    arguments = [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen([_binary(), *arguments], stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(process, port, log)
        yield
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _configuration(targets: Sequence[str]) -> dict[str, Any]:
    jobs = [
        {
            "job_name": target,
            "scheme": urlsplit(target).scheme,
            "metrics_path": urlsplit(target).path,
            "static_configs": [{"targets": [urlsplit(target).netloc]}],
        }
        for target in targets
    ]
    return {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs}


def _binary() -> str:
    found = shutil.which("prometheus") or next(map(str, sorted(_TOOLS.glob("**/bin/prometheus"))), None)
    assert found is not None, f"this test needs Prometheus: put `prometheus` on the PATH or under {_TOOLS}"
    return found


def _wait_until_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    end = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/-/ready", timeout=1, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(_POLL_S)
    raise AssertionError(f"Prometheus did not become ready:\n{log.read_text()[-2000:]}")
