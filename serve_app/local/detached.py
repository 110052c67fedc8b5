"""Owns the one background run of this user: its state file, waiting until it is ready, and ending it.

The background run is `tokenline run` itself, told its run id, writing to files. Knows nothing of what is served.
"""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import filelock
import msgspec
import psutil

from serve_app.cache import cache_folder
from serve_app.errors import ConfigError, TokenlineError
from serve_app.local.processes import TAG, has_tag, sweep, tagged
from serve_app.local.progress import Reporter

_POLL_S = 0.2
# The supervisor itself takes about 10 s; after that its processes are swept up from here.
_STOP_S = 13.0
_SWEEP_GRACE_S = 0.5


class DetachFailed(TokenlineError):
    """The background run ended before it was ready; what it said stands above."""


class State(msgspec.Struct, frozen=True):
    """What is known of the background run. Its identity is `run_id`, the tag its processes carry; never a pid."""

    run_id: str
    pid: int
    url: str = ""
    ready: bool = False


def folder() -> Path:
    """Where the background run's state and logs are."""
    return cache_folder() / "run"


def log_path() -> Path:
    """What Ray and the replicas of the latest background run wrote."""
    return folder() / "serve.log"


def current() -> State | None:
    """The background run, or None; a state whose processes are all gone counts as none."""
    state = _read()
    return state if state is not None and tagged(state.run_id) else None


def start(arguments: list[str], reporter: Reporter) -> State:
    """Run `tokenline run` with `arguments` in the background; returns once it is ready, showing its progress till then.

    Raises ConfigError if a background run exists, DetachFailed if the new one ends. Ctrl-C ends it too.
    """
    folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    with filelock.FileLock(folder() / ".lock"):
        if (running := current()) is not None:
            where = f"at {running.url}" if running.url else "and still starting"
            raise ConfigError(f"a background run is already there, {where}; `make stop` ends it")
        process = _spawn(run_id := uuid.uuid4().hex, arguments)
        _write(State(run_id, process.pid))
    try:
        return _wait(process, run_id, reporter)
    except BaseException:
        stop()
        raise


def mark_ready(run_id: str, url: str) -> None:
    """The background run says of itself that it serves."""
    _write(State(run_id, os.getpid(), url, ready=True))


def forget(run_id: str) -> None:
    """The background run says of itself that it has ended."""
    if (state := _read()) is not None and state.run_id == run_id:
        _state_path().unlink(missing_ok=True)


def stop() -> State | None:
    """End the background run and every process of it, and nothing else. Returns what was ended, None if nothing ran."""
    state = _read()
    if state is None:
        return None
    running = bool(tagged(state.run_id))
    with contextlib.suppress(psutil.Error):
        supervisor = psutil.Process(state.pid)
        if has_tag(supervisor, state.run_id):
            supervisor.terminate()
            supervisor.wait(_STOP_S)
    sweep(state.run_id, _SWEEP_GRACE_S)
    forget(state.run_id)
    return state if running else None


def _spawn(run_id: str, arguments: list[str]) -> "subprocess.Popen[bytes]":
    log_path().write_bytes(b"")
    with _progress_path().open("wb") as progress:
        return subprocess.Popen(
            [sys.executable, "-m", "serve_app.cli", "run", *arguments, "--run-id", run_id],
            stdin=subprocess.DEVNULL,
            stdout=progress,
            stderr=subprocess.STDOUT,
            env=os.environ | {TAG: run_id},
            start_new_session=True,
        )


def _wait(process: "subprocess.Popen[bytes]", run_id: str, reporter: Reporter) -> State:
    with _progress_path().open(encoding="utf-8") as progress:
        while True:
            ended = process.poll() is not None
            for line in progress:
                reporter.say(line.rstrip("\n"))
            state = _read()
            if ended or state is None:
                raise DetachFailed(f"the background run ended before it was ready; its log is {log_path()}")
            if state.ready and state.run_id == run_id:
                return state
            time.sleep(_POLL_S)


def _read() -> State | None:
    try:
        return msgspec.json.decode(_state_path().read_bytes(), type=State)
    except (OSError, msgspec.DecodeError):
        return None


def _write(state: State) -> None:
    """In one step, so that no reader sees half of it; readable by this user only."""
    fresh = _state_path().with_suffix(f".{os.getpid()}")
    fresh.touch(mode=0o600)
    fresh.write_bytes(msgspec.json.encode(state))
    fresh.replace(_state_path())


def _state_path() -> Path:
    return folder() / "state.json"


def _progress_path() -> Path:
    return folder() / "progress.log"
