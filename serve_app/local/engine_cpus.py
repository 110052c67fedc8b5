"""Owns keeping a run's own processes off the CPUs that vLLM computes on, where it computes on CPUs.

vLLM binds each worker to CPUs and leaves some to everybody else (`VLLM_CPU_NUM_OF_RESERVED_CPU`), but nothing makes the
others stay there: on two CPUs every hop that wakes up interrupts the worker half of the time (docs/decisions.md). On
GPUs no worker binds itself, and nothing is moved. Knows nothing of what the processes do.
"""

import contextlib
import os
from collections.abc import Set as AbstractSet

import psutil

_WORKER = "VLLM::Worker"
# What these start has the CPUs they have: vLLM's core, which is also the better for moving about; and the next engine,
# which must find all of them. An idle worker of Ray's may become that engine.
_STAYING = ("VLLM::", "ray::IDLE")
_RAYLET = "raylet"
# With less, hops that wait for each other cost more than they disturb: on two CPUs they and Ray use up to 0.6 of one.
_LEAST_SHARE = 1 / 4


def make_room(root: int) -> set[int]:
    """Moves the process `root` and those below it to the CPUs that no worker of vLLM's has bound itself to.

    Returns these CPUs; empty where nothing was moved. Processes that start later are not moved.
    """
    family = _family(root)
    workers = [process for process, title in family.items() if title.startswith(_WORKER)]
    if not (rest := others(os.sched_getaffinity(0), _bound(workers))):
        return set()
    for process, title in family.items():
        if not stays(title):
            _move(process, rest)
    return rest


def others(allowed: AbstractSet[int], bound: AbstractSet[int]) -> set[int]:
    """The CPUs of `allowed` for what is no worker; none where nothing is bound, or where too few would be left."""
    rest = set(allowed) - bound
    return rest if bound and len(rest) >= _LEAST_SHARE * len(allowed) else set()


def stays(title: str) -> bool:
    """Whether a process with this command line keeps the CPUs it has."""
    return title.startswith(_STAYING) or os.path.basename(title.split(" ")[0]) == _RAYLET


def _family(root: int) -> dict[psutil.Process, str]:
    """With their titles. vLLM and Ray's agents write theirs over their environment, so no tag finds them."""
    found = {}
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(root)
        for process in [first, *first.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                found[process] = " ".join(process.cmdline())
    return found


def _bound(workers: list[psutil.Process]) -> set[int]:
    bound: set[int] = set()
    for worker in workers:
        with contextlib.suppress(psutil.Error):
            bound |= set(worker.cpu_affinity())
    return bound


def _move(process: psutil.Process, cpus: AbstractSet[int]) -> None:
    with contextlib.suppress(psutil.Error):
        for thread in process.threads():
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(thread.id, cpus)
