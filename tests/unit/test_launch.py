"""The supervisor with a stand-in for the process that holds Ray: what it waits for, says, and leaves behind."""

import io
import os
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from serve_app import launch
from serve_app.launch import LaunchFailed, serving
from serve_app.local import environment
from serve_app.local.processes import tagged
from serve_app.local.progress import Reporter

# Stands in for deployments/local.py: it sends the given events, answers /ready, and starts a child that ignores SIGTERM
# and has left the process group, as HAProxy or an engine core might.
PREAMBLE = """
import http.server, json, os, signal, subprocess, sys, threading, time
order = json.load(open(sys.argv[1]))
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
def emit(kind, **fields):
    print(json.dumps({"kind": kind, **fields}), flush=True)
class Ready(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Ready.asked += 1
        self.send_response(200 if Ready.asked > 1 else 503)
        self.end_headers()
    def log_message(self, *_): pass
def listen():
    options = order["content"]["http_options"]
    server = http.server.HTTPServer((options["host"], options["port"]), Ready)
    threading.Thread(target=server.serve_forever, daemon=True).start()
def until_told():
    sys.stdin.buffer.read()
"""
WELL = """
emit("ray"); emit("serve")
emit("deployment", name="engine", status="UPDATING")
emit("deployment", name="engine", status="HEALTHY")
listen()
emit("application", name="toy", status="RUNNING")
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "toy.yaml"
    application = {"name": "toy", "import_path": "nowhere:app", "args": {"model": {"name": "m"}, "engine": {"a": 1}}}
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the supervisor run this program where it would run `deployments.local`."""
    path = tmp_path / "stand_in.py"
    monkeypatch.setattr(launch, "_CHILD", [sys.executable, str(path)])
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setattr(environment, "new_folder", lambda: folder)  # a failed run keeps it

    def write(program: str) -> None:
        path.write_text(PREAMBLE + textwrap.dedent(program))

    return write


def test_serving_ends_with_no_process_and_no_folder_left(config: Path, stand_in: Callable[[str], None]) -> None:
    stand_in(WELL + "until_told()")
    with serving(config, port=0) as service:
        assert service.model == "m"
        assert service.url.startswith("http://127.0.0.1:")
        assert len(tagged(service.run_id)) == 2
        assert service.log.exists()
    assert tagged(service.run_id) == []
    assert not service.log.parent.exists()


def test_progress_names_each_step_and_its_time(config: Path, stand_in: Callable[[str], None]) -> None:
    stand_in(WELL + "until_told()")
    out = io.StringIO()
    with serving(config, port=0, reporter=Reporter(out)):
        pass
    said = out.getvalue()
    for words in (
        "ray: started after ",
        "engine: loading the model …",
        "engine: ready after ",
        "warm-up: ready after ",
    ):
        assert words in said


def test_overrides_reach_the_application(config: Path, stand_in: Callable[[str], None]) -> None:
    stand_in(
        """
        args = order["content"]["applications"][0]["args"]
        emit("error", message=json.dumps(args["engine"], sort_keys=True))
        until_told()
        """
    )
    with (
        pytest.raises(LaunchFailed, match=r'\{"a": 1, "b": 2\}'),
        serving(config, port=0, overrides={"engine": {"b": 2}}),
    ):
        pass


def test_a_failed_deployment_is_named_with_its_last_lines(config: Path, stand_in: Callable[[str], None]) -> None:
    stand_in(
        """
        emit("ray"); emit("serve")
        lines = [f"line {i}" for i in range(100)] + ["\\x1b[31mRuntimeError: no memory\\x1b[0m"]
        emit("deployment", name="engine", status="DEPLOY_FAILED", message="\\n".join(lines))
        until_told()
        """
    )
    with pytest.raises(LaunchFailed) as raised, serving(config, port=0):
        pass
    message = str(raised.value)
    assert message.startswith("engine failed:\n")
    assert "\nRuntimeError: no memory\nThe log is " in message
    assert "line 1\n" not in message
    log = Path(message.rsplit("The log is ", 1)[1])
    assert log.exists()  # a failed run keeps its folder


def test_a_child_that_dies_is_told_and_its_own_children_are_ended(
    config: Path, stand_in: Callable[[str], None]
) -> None:
    stand_in('emit("ray"); os.kill(os.getpid(), signal.SIGKILL)')
    with pytest.raises(LaunchFailed, match="SIGKILL"), serving(config, port=0, run_id="dead-child"):
        pass
    assert tagged("dead-child") == []


def test_a_deployment_that_turns_unhealthy_is_reported_and_the_service_goes_on(
    config: Path, stand_in: Callable[[str], None]
) -> None:
    stand_in(
        WELL
        + """time.sleep(1)
emit("deployment", name="engine", status="UNHEALTHY", message="died")
emit("deployment", name="engine", status="HEALTHY")
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    shown = io.StringIO()
    # What ends the wait is the end of the child after that, not the unhealthy engine.
    with pytest.raises(LaunchFailed, match="SIGKILL"), serving(config, port=0, reporter=Reporter(shown)) as service:
        service.wait()
    assert "engine: unhealthy: died\nengine: Ray Serve replaces it …\nengine: ready after" in shown.getvalue()


def test_a_start_that_takes_too_long_is_ended(config: Path, stand_in: Callable[[str], None]) -> None:
    stand_in('emit("ray"); until_told()')
    with pytest.raises(LaunchFailed, match="not ready in time"), serving(config, port=0, run_id="slow", timeout_s=1.0):
        pass
    assert tagged("slow") == []


def test_a_child_that_does_not_stop_is_killed(
    config: Path, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_CHILD_STOP_S", 0.2)
    stand_in("signal.signal(signal.SIGTERM, signal.SIG_IGN)" + WELL + "time.sleep(600)")
    with serving(config, port=0) as service:
        pass
    assert tagged(service.run_id) == []


def test_an_interrupt_inside_the_block_ends_the_run(config: Path, stand_in: Callable[[str], None]) -> None:
    stand_in(WELL + "until_told()")
    with pytest.raises(KeyboardInterrupt), serving(config, port=0, run_id="interrupted"):
        raise KeyboardInterrupt
    assert tagged("interrupted") == []


def test_the_supervisor_itself_loads_no_ray() -> None:
    program = "import sys, serve_app.cli; sys.exit(any(name in sys.modules for name in ('ray', 'torch', 'vllm')))"
    began = time.monotonic()
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", program) == 0
    assert time.monotonic() - began < 30
