"""Who leaves the CPUs that vLLM's workers have bound themselves to."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

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


Start = Callable[[str, int | None], int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process with that title, bound to a CPU or to none; returns its pid."""
    children: list[subprocess.Popen[bytes]] = []

    def begin(title: str, cpu: int | None = None) -> int:
        child = subprocess.Popen(["bash", "-c", f"exec -a '{title}' sleep 600"])
        children.append(child)
        _await_title(child.pid, title)
        if cpu is not None:
            os.sched_setaffinity(child.pid, {cpu})
        return child.pid

    yield begin
    for child in children:
        child.kill()
        child.wait()


@pytest.fixture
def own_cpus() -> Iterator[set[int]]:
    """This test's process is the root of the family, and is moved too."""
    before = os.sched_getaffinity(0)
    yield before
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), before)


@needs_two_cpus
def test_a_family_leaves_the_workers_cpu_and_those_that_start_engines_stay(start: Start, own_cpus: set[int]) -> None:
    last = max(own_cpus)
    worker, core = start("VLLM::Worker", last), start("VLLM::EngineCore", None)
    hop, idle = start("ray::ServeReplica:tokenline:gateway", None), start("ray::IDLE", None)
    rest = make_room(os.getpid())
    assert rest == own_cpus - {last}
    assert os.sched_getaffinity(worker) == {last}
    assert os.sched_getaffinity(hop) == rest
    assert os.sched_getaffinity(core) == os.sched_getaffinity(idle) == own_cpus


@needs_two_cpus
def test_nothing_moves_where_no_worker_is_bound(start: Start, own_cpus: set[int]) -> None:
    hop = start("ray::ServeReplica:tokenline:gateway", None)
    start("VLLM::Worker", None)
    assert make_room(os.getpid()) == set()
    assert os.sched_getaffinity(hop) == own_cpus


def test_a_root_that_is_gone_is_no_error() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert make_room(child.pid) == set()


def _await_title(pid: int, title: str) -> None:
    while not Path(f"/proc/{pid}/cmdline").read_text().startswith(title):
        pass
