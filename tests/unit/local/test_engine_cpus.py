"""Who leaves the CPUs that vLLM's workers have bound themselves to."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from serve_app.local.engine_cpus import make_room, others, stays

needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU leaves nothing to move to")


@pytest.mark.parametrize(
    ("allowed", "bound", "left"),
    [
        ({0, 1}, {0}, {1}),
        ({0, 1, 2, 3}, {0, 1, 2}, {3}),
        ({0, 1}, set(), set()),  # a GPU's worker, or `nobind`
        ({0, 1}, {0, 1}, set()),
        (set(range(8)), set(range(7)), set()),  # one for all hops is too few
        (set(range(8)), set(range(6)), {6, 7}),
        ({2, 3}, {0}, {2, 3}),  # bound to what this process may not use
    ],
)
def test_others_get_what_workers_did_not_bind_unless_that_is_too_little(
    allowed: set[int], bound: set[int], left: set[int]
) -> None:
    assert others(allowed, bound) == left


@pytest.mark.parametrize(
    ("title", "kept"),
    [
        ("VLLM::Worker_TP0", True),
        ("VLLM::EngineCore", True),
        ("ray::IDLE", True),
        ("/v/site-packages/ray/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/x", True),
        ("ray::ServeReplica:tokenline:engine", False),
        ("ray::ServeReplica:tokenline:gateway", False),
        ("/v/bin/haproxy -db -f /tmp/raylet", False),
        ("", False),
    ],
)
def test_what_starts_engines_keeps_all_cpus(title: str, kept: bool) -> None:
    assert stays(title) is kept


Family = Callable[..., tuple[int, list[int]]]


@pytest.fixture
def family() -> Iterator[Family]:
    """Starts a process and one below it for each title; returns its pid and theirs.

    Below this test's own process there may be a service on vLLM.
    """
    roots: list[subprocess.Popen[bytes]] = []

    def begin(*titles: str) -> tuple[int, list[int]]:
        lines = [f"(exec -a '{title}' sleep 600) & " for title in titles]
        root = subprocess.Popen(["bash", "-c", "".join(lines) + "wait"])
        roots.append(root)
        while sorted(found := {_title(child): child.pid for child in _children(root)}) != sorted(titles):
            time.sleep(0.01)
        return root.pid, [found[title] for title in titles]

    yield begin
    for root in roots:
        for process in [*_children(root), root]:
            process.kill()
        root.wait()


@needs_two_cpus
def test_a_family_leaves_the_workers_cpu_and_those_that_start_engines_stay(family: Family) -> None:
    own = os.sched_getaffinity(0)
    root, (worker, core, hop, idle) = family(
        "VLLM::Worker", "VLLM::EngineCore", "ray::ServeReplica:tokenline:gateway", "ray::IDLE"
    )
    os.sched_setaffinity(worker, {max(own)})
    rest = make_room(root)
    assert rest == own - {max(own)}
    assert os.sched_getaffinity(worker) == {max(own)}
    assert os.sched_getaffinity(hop) == os.sched_getaffinity(root) == rest
    assert os.sched_getaffinity(core) == os.sched_getaffinity(idle) == own


@needs_two_cpus
def test_nothing_moves_where_no_worker_is_bound(family: Family) -> None:
    root, (hop, _) = family("ray::ServeReplica:tokenline:gateway", "VLLM::Worker")
    assert make_room(root) == set()
    assert os.sched_getaffinity(hop) == os.sched_getaffinity(0)


def test_a_root_that_is_gone_is_no_error() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert make_room(child.pid) == set()


def _children(root: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    return psutil.Process(root.pid).children()


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()[:1])
    return ""
