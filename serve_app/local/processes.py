"""Owns telling this project's processes from all others, by a tag in their environment, and ending them.

Every process of a run inherits the tag: Ray's own, its workers, vLLM's engine core and workers, HAProxy. The tag
outlives `setproctitle` (seen with Ray 2.60) and the death of parents. Knows nothing of what the processes do.
"""

import contextlib
import os
import time

import psutil

TAG = "TOKENLINE_RUN_ID"
_KILL_WAIT_S = 3.0
_POLL_S = 0.05


def tagged(run_id: str) -> list[psutil.Process]:
    """The live processes of that run, this one left out."""
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and has_tag(process, run_id)]


def has_tag(process: psutil.Process, run_id: str) -> bool:
    """Whether it carries exactly this tag; a recycled pid does not. False for one that is gone or of another user."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(TAG) == run_id
    except (psutil.Error, OSError):
        return False


def sweep(run_id: str, grace_s: float) -> int:
    """End every process of that run: SIGTERM, after `grace_s` seconds SIGKILL. Returns how many had to be told.

    Repeats until none is left or a few seconds have passed: a process may start another while it is being ended.
    """
    told: set[int] = set()
    deadline = time.monotonic() + grace_s + _KILL_WAIT_S
    kill_from = time.monotonic() + grace_s
    while (found := tagged(run_id)) and time.monotonic() < deadline:
        kill = time.monotonic() >= kill_from
        for process in found:
            if kill or process.pid not in told:
                _end(process, kill)
            told.add(process.pid)
        time.sleep(_POLL_S)  # not psutil.wait_procs, which would take the exit status from the Popen that owns it
    return len(told)


def _end(process: psutil.Process, kill: bool) -> None:
    with contextlib.suppress(psutil.Error):  # it has just gone; psutil itself refuses a recycled pid
        if kill:
            process.kill()
        else:
            process.terminate()
