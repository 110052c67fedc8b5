"""A deliberate 300 ms in one hop of the running application: in its span, nowhere else, and `explain` names it."""

import os
import time
import uuid
from typing import Any

import httpx
import msgspec
import pytest
from receiver import ReceivedSpan, Receiver
from trace_tree import DELAYS, took

from serve_app.cli import main
from serve_app.explain.explain import explain
from serve_app.launch import serving
from serve_app.local.servefile import DEFAULT_CONFIG
from serve_app.messages import RequestMetrics
from serve_app.telemetry import names

SIMULATED = DEFAULT_CONFIG.with_name("simulated.yaml")
DELAY_S = 0.3
pytestmark = pytest.mark.timeout(300)


# One here, since each needs an application of its own, and all six in tests/contract/test_delays.py, on the whole path
# in one process. All six here too: TOKENLINE_ALL_DELAYS=1
CASES = DELAYS if os.environ.get("TOKENLINE_ALL_DELAYS") else {"template_ms": names.TEMPLATE}


@pytest.mark.parametrize(("delay", "stage"), CASES.items())
def test_a_delay_is_seen_in_its_hop_and_nowhere_else(
    delay: str, stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    with Receiver() as receiver:
        args = {
            "tracing": {"endpoint": receiver.grpc_url},
            "delays": {delay: 1000 * DELAY_S},
            "engine": {"sim": {"step_ms": 2.0}},
        }
        with serving(SIMULATED, port=0, overrides=args) as service:
            spans, requests = ask_five_times(service.url, receiver)
            assert main(["explain", "--url", service.url, "--last", "5"]) == 0
    seconds = took(spans)
    assert seconds.pop(stage) >= DELAY_S - 0.005  # a timer may fire a little early
    assert sum(seconds.values()) < DELAY_S, seconds
    assert explain(requests).dominant == stage
    assert f"the largest part of the wait is {stage}" in capsys.readouterr().out


def ask_five_times(url: str, receiver: Receiver) -> tuple[list[ReceivedSpan], tuple[RequestMetrics, ...]]:
    """The spans of five short chats, and what the insight remembers of them."""
    body: dict[str, Any] = {
        "model": "simulated",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
        "stream": True,
    }
    traces = [uuid.uuid4().hex for _ in range(5)]
    for trace in traces:
        headers = {"traceparent": f"00-{trace}-{'1' * 16}-01"}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=30).status_code == 200
    receiver.wait_for(lambda spans: sum(span.trace_id in traces for span in spans) == 5 * 15)
    with httpx.Client(base_url=url) as http:
        return receiver.spans(), latest(http, 5)


def latest(http: httpx.Client, count: int) -> tuple[RequestMetrics, ...]:
    """So many requests from the insight, which hears of them within a second or two."""
    requests: tuple[RequestMetrics, ...] = ()
    for _ in range(100):
        answer = http.get("/insight/requests", params={"last": count})
        requests = msgspec.json.decode(answer.content, type=tuple[RequestMetrics, ...])
        if len(requests) == count:
            break
        time.sleep(0.1)
    assert len(requests) == count
    return requests
