"""Ending exactly the processes that carry a tag."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator

import psutil
import pytest

from serve_app.local.processes import TAG, has_tag, sweep, tagged

SLEEP = "print(1, flush=True); import time; time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP


def start(program: str, run_id: str, **options: bool) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ | {TAG: run_id}, **options
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


@pytest.fixture
def bystander() -> Iterator["subprocess.Popen[bytes]"]:
    process = start(SLEEP, "another run")
    yield process
    process.kill()
    process.wait()


def test_a_sweep_ends_every_process_of_the_run_and_no_other(bystander: "subprocess.Popen[bytes]") -> None:
    run_id = uuid.uuid4().hex
    ours = [start(SLEEP, run_id), start(STUBBORN, run_id), start(SLEEP, run_id, start_new_session=True)]
    assert sweep(run_id, grace_s=0.3) == 3
    assert [process.wait() for process in ours] == [-15, -9, -15]
    assert bystander.poll() is None
    assert tagged("another run")[0].pid == bystander.pid


def test_an_orphan_is_still_found() -> None:
    run_id = uuid.uuid4().hex
    nested = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], stdout=subprocess.DEVNULL)"
    parent = subprocess.Popen([sys.executable, "-c", nested], env=os.environ | {TAG: run_id})
    parent.wait()
    assert len(tagged(run_id)) == 1
    assert sweep(run_id, grace_s=1.0) == 1
    assert tagged(run_id) == []


def test_a_sweep_of_nothing_is_at_once_over() -> None:
    assert sweep(uuid.uuid4().hex, grace_s=60.0) == 0


def test_a_process_of_a_longer_run_id_is_not_ours(bystander: "subprocess.Popen[bytes]") -> None:
    assert not has_tag(psutil.Process(bystander.pid), "another")
    assert has_tag(psutil.Process(bystander.pid), "another run")
