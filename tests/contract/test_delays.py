"""A deliberate 300 ms in each of six places: in that place's span, in no other, and `explain` names it."""

import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from receiver import Receiver
from trace_tree import DELAYS, took

from serve_app.explain.explain import explain

DELAY_S = 0.3
CHAT = {"model": "simulated", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.mark.parametrize(("delay", "stage"), DELAYS.items())
def test_a_delay_is_seen_in_its_place_and_nowhere_else(serve: Any, receiver: Receiver, delay: str, stage: str) -> None:
    service = serve({"tracing": {"endpoint": receiver.grpc_url}, "delays": {delay: 1000 * DELAY_S}})
    traces = [uuid.uuid4().hex for _ in range(3)]
    for trace_id in traces:
        headers = {"traceparent": f"00-{trace_id}-{'1' * 16}-01"}
        assert httpx.post(f"{service.url}/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
    receiver.wait_for(lambda spans: sum(one.trace_id in traces for one in spans) == 3 * 15)
    seconds = took(one for one in receiver.spans() if one.trace_id in traces)
    assert seconds.pop(stage) >= DELAY_S - 0.005  # a timer may fire a little early
    assert sum(seconds.values()) < DELAY_S, seconds
    requests = [request for trace_id in traces for request in service.requests(id=trace_id)]
    assert explain(requests).dominant == stage
