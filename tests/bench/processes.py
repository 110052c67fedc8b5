"""The processes of a system: which they are, what each is for, the CPU time each took, and their end.

A system's processes carry a tag in their environment (`serve_app/local/processes.py`). Those that write a longer title
over their environment (vLLM's engine core, Ray's agents) are found as descendants, or by the session all of them share.
"""

import collections
import contextlib
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

from serve_app.local.processes import tagged

ENGINE = "engine core"
# The first pattern that is found in a process's title names what it is for.
_GROUPS = {
    r"^VLLM::": ENGINE,
    r"^ray::ServeReplica:[^:]+:(gateway|OpenAiIngress|LLMRouter)": "gateway",
    r"^ray::ServeReplica:[^:]+:tokenizer": "tokenizer",
    r"^ray::ServeReplica:[^:]+:postprocess": "postprocess",
    r"^ray::ServeReplica:[^:]+:(engine|LLMServer)": "engine replica",
    r"^ray::ServeReplica:[^:]+:insight": "insight",
    r"vllm\.entrypoints\.openai\.api_server": "API server",
    r"^ray::(HAProxyManager|ProxyActor)": "Ray: proxy",
    r"haproxy": "HAProxy",
    r"^ray::ServeController": "Ray: controller",
    r"raylet/raylet": "Ray: raylet",
    r"gcs_server": "Ray: GCS",
    r"^ray::\w*Agent|dashboard|monitor\.py|agent\.py": "Ray: dashboard, agents",
    r"deployments\.local|ray_llm\.py": "Ray: driver",
    r"^ray::": "Ray: workers",
}
# In the order of a request's way.
GROUPS = [*dict.fromkeys(["HAProxy", "API server", *_GROUPS.values()]), "other"]
_POLL_S = 0.1
_GRACE_S = 3.0
_KILL_S = 5.0


@dataclass(frozen=True)
class Usage:
    """CPU seconds of one process so far."""

    group: str
    cpu_s: float


# By pid and time of creation, so that a pid that is used again is another process.
Usages = Mapping[tuple[int, float], Usage]


def group_of(title: str) -> str:
    """What a process with this command line is for."""
    return next((group for pattern, group in _GROUPS.items() if re.search(pattern, title)), "other")


def spent(before: Usages, after: Usages) -> dict[str, float]:
    """CPU seconds by group between two looks. What a process that ended between them took is not known, so left out."""
    by_group: dict[str, float] = {}
    for key, usage in after.items():
        begin_s = before[key].cpu_s if key in before else 0.0
        by_group[usage.group] = by_group.get(usage.group, 0.0) + usage.cpu_s - begin_s
    return by_group


def members(run_id: str, root: int) -> list[psutil.Process]:
    """The live processes of a run: those that carry its tag, those in its root's session, and their descendants."""
    found = {process.pid: process for process in tagged(run_id)}
    children: dict[int, list[psutil.Process]] = collections.defaultdict(list)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            children[process.ppid()].append(process)
            if os.getsid(process.pid) == root:
                found[process.pid] = process
    parents = list(found)
    while parents:
        born = {child.pid: child for child in children[parents.pop()] if child.pid not in found}
        found |= born
        parents += born
    return [process for process in found.values() if process.pid != os.getpid() and _lives(process)]


def usages(processes: Iterable[psutil.Process]) -> Usages:
    """A look at those that still live. Quick, so that it can be taken amid a measurement, as `members` cannot."""
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times, title = process.cpu_times(), " ".join(process.cmdline())
            found[process.pid, process.create_time()] = Usage(group_of(title), times.user + times.system)
    return found


def end(run_id: str, root: int, known: Iterable[psutil.Process] = ()) -> list[str]:
    """End every process of a run and those `known` to be its: SIGTERM, then SIGKILL.

    Returns the titles of those that outlived even that, which is none but for a process the kernel holds.
    """
    found = {process.pid: process for process in [*known, *members(run_id, root)]}
    kill_from_s = time.monotonic() + _GRACE_S
    told: set[int] = set()
    while alive := [process for process in found.values() if _lives(process)]:
        now = time.monotonic()
        if now > kill_from_s + _KILL_S:
            return [process.name() for process in alive]
        for process in alive:
            with contextlib.suppress(psutil.Error):
                if now > kill_from_s:
                    process.kill()
                elif process.pid not in told:
                    process.terminate()
            told.add(process.pid)
        time.sleep(_POLL_S)
        found |= {process.pid: process for process in members(run_id, root)}
    return []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
