"""The running application, started by the same code as `make run`, on real vLLM or on the simulated engine.

One service at a time, since two cores cannot carry two: fixtures are module-scoped, and the one on vLLM, which takes
long to load, lasts to the end of the session and is used by the last modules (`test_vllm*.py`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from receiver import Receiver

from serve_app.launch import Service, serving

CONFIGS = Path(__file__).parents[2] / "serve_app" / "configs"
REFERENCE = Path(__file__).with_name("reference.py")


@pytest.fixture(scope="session", autouse=True)
def _quick_telemetry() -> Iterator[None]:
    """Spans and metrics leave every process at once, not after 5 s and 10 s."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        environment.setenv("RAY_metrics_report_interval_ms", "1000")
        yield


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    """Where the service on vLLM sends its spans."""
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What vLLM's own `LLM` gives for the prompts of `reference.py`, in a process that has ended since."""
    result = tmp_path_factory.mktemp("reference") / "reference.json"
    run = subprocess.run([sys.executable, REFERENCE, result], capture_output=True, text=True, timeout=400, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    cases: list[dict[str, Any]] = json.loads(result.read_text())
    return cases


@pytest.fixture(scope="session")
def vllm_service(reference: list[dict[str, Any]], receiver: Receiver) -> Iterator[Service]:
    """`local-cpu.yaml`, traced, on a free port; after `reference`, so that the two do not share the cores.

    With TOKENLINE_PLAIN_STREAMS=1 without the token channel, which must make no difference to any test.
    """
    plain = os.environ.get("TOKENLINE_PLAIN_STREAMS") == "1"
    overrides = {"tracing": {"endpoint": receiver.grpc_url}, "channel": {"enabled": not plain}}
    with serving(CONFIGS / "local-cpu.yaml", port=0, overrides=overrides) as service:
        yield service


@pytest.fixture(scope="module")
def sim_service() -> Iterator[Service]:
    """`simulated.yaml` in `echo` mode, on a free port: each stream repeats its own prompt."""
    with serving(CONFIGS / "simulated.yaml", port=0, overrides={"engine": {"sim": {"source": "echo"}}}) as service:
        yield service


@pytest.fixture
def client(vllm_service: Service) -> Iterator[openai.OpenAI]:
    """The official client, without retries that would hide an error."""
    with openai.OpenAI(base_url=f"{vllm_service.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(vllm_service: Service) -> Iterator[httpx.Client]:
    """A plain HTTP client."""
    with httpx.Client(base_url=vllm_service.url, timeout=60) as client:
        yield client
