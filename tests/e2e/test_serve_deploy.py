"""Plain `serve deploy` on a cluster that `ray start --head` made, as on a real one: no launcher of ours in between."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from serve_app.local.environment import child_environment, new_folder
from serve_app.local.ports import free_ports
from serve_app.local.processes import sweep

pytestmark = pytest.mark.timeout(600)

CONFIG = Path(__file__).parents[2] / "serve_app" / "configs" / "simulated.yaml"
BIN = Path(sys.executable).parent


class Cluster:
    """A head node of this test's own, and the `serve` command pointed at it."""

    def __init__(self, environment: dict[str, str], dashboard: str) -> None:
        self._environment = environment
        self._dashboard = dashboard

    def serve(self, *arguments: str) -> str:
        command = [str(BIN / "serve"), arguments[0], "--address", self._dashboard, *arguments[1:]]
        run = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=120, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    def application(self) -> dict[str, Any]:
        status: dict[str, Any] = yaml.safe_load(self.serve("status"))
        found: dict[str, Any] = status["applications"].get("tokenline", {"status": "NOT_STARTED", "message": ""})
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    run_id, folder = uuid.uuid4().hex, new_folder()
    gcs, dashboard, agent, client = free_ports(4)
    environment = child_environment(os.environ, run_id, folder)
    head = [str(BIN / "ray"), "start", "--head", "--block", f"--port={gcs}", f"--temp-dir={folder}", "--num-cpus=4"]
    head += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    head += [f"--ray-client-server-port={client}", "--disable-usage-stats"]
    process = subprocess.Popen(head, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{dashboard}"
        # 401 is an answer too: the cluster asks for the run's token, which Ray's own commands send.
        _wait(lambda: httpx.get(f"{address}/api/version").status_code in (200, 401), 90)
        yield Cluster(environment, address)
    finally:
        # By parentage too: Ray's two agents were seen without the tag, and outlive their raylet by a minute and a half.
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        sweep(run_id, 3.0)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


def _wait(condition: Any, limit_s: float) -> None:
    begin = time.monotonic()
    while True:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() - begin < limit_s, f"not within {limit_s} s"
        time.sleep(0.5)


def _config(tmp_path: Path, **changes: Any) -> tuple[str, str]:
    """A copy of the config file on a free port, with `changes` in the engine's section; its path and URL."""
    (port,) = free_ports(1)
    content = yaml.safe_load(CONFIG.read_text())
    content["http_options"]["port"] = port
    content["applications"][0]["args"]["engine"] |= changes
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path), f"http://127.0.0.1:{port}"


def test_a_misspelt_key_is_refused_with_its_name(cluster: Cluster, tmp_path: Path) -> None:
    path, _ = _config(tmp_path, replicsa=2)
    cluster.serve("deploy", path)
    _wait(lambda: cluster.application()["status"] == "DEPLOY_FAILED", 120)
    assert "engine.replicsa: unknown key; did you mean replicas?" in cluster.application()["message"]


def test_the_config_file_as_it_stands_serves_a_chat(cluster: Cluster, tmp_path: Path) -> None:
    path, url = _config(tmp_path)
    cluster.serve("shutdown", "--yes")  # HTTP options are those of the first deploy, and that was another port
    cluster.serve("deploy", path)
    _wait(lambda: httpx.get(f"{url}/ready").status_code == 200, 180)
    body = {"model": "simulated", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3
