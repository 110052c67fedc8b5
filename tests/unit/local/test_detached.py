"""The one background run: its state, and that ending it ends nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from serve_app.errors import ConfigError
from serve_app.local import detached
from serve_app.local.detached import DetachFailed, State
from serve_app.local.processes import TAG, tagged
from serve_app.local.progress import Reporter

SLEEP = "print(1, flush=True); import time; time.sleep(600)"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLINE_CACHE", str(tmp_path))
    detached.folder().mkdir()


def start(run_id: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEP], stdout=subprocess.PIPE, env=os.environ | {TAG: run_id}, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


def test_stop_ends_the_run_and_forgets_it() -> None:
    process = start("the-run")
    state = State("the-run", process.pid, "http://u", ready=True)
    detached._write(state)
    assert detached.current() == state
    assert detached.stop() == state
    process.wait()
    assert tagged("the-run") == []
    assert detached.current() is None
    assert detached.stop() is None


def test_stop_never_touches_a_process_that_has_the_runs_old_pid() -> None:
    stranger = start("another-run")
    try:
        detached._write(State("the-run", stranger.pid, "http://u", ready=True))
        assert detached.stop() is None
        assert stranger.poll() is None
        assert not (detached.folder() / "state.json").exists()
    finally:
        stranger.kill()
        stranger.wait()


def test_stop_sweeps_up_what_a_killed_supervisor_left() -> None:
    orphan = start("the-run")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    detached._write(State("the-run", gone.pid))
    assert detached.stop() is not None
    assert orphan.wait() == -15


def test_the_state_file_is_for_this_user_only() -> None:
    detached._write(State("the-run", 1))
    path = detached.folder() / "state.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert msgspec.json.decode(path.read_bytes(), type=State).run_id == "the-run"


def test_a_second_background_run_is_refused_with_the_first_ones_address() -> None:
    process = start("the-run")
    detached._write(State("the-run", process.pid, "http://127.0.0.1:8000", ready=True))
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:8000; `make stop` ends it"):
        detached.start([], Reporter(None))
    detached.stop()
    process.wait()


def test_a_background_run_that_fails_is_told_and_leaves_no_state(tmp_path: Path) -> None:
    with pytest.raises(DetachFailed):
        detached.start([str(tmp_path / "no-such-config.yaml")], Reporter(None))
    assert detached.current() is None
    assert not (detached.folder() / "state.json").exists()
