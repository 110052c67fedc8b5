"""The whole path while the receiver of its traces is in trouble: no client notices, what is lost is counted, and once
the receiver is well again traces arrive by themselves.

That nobody waited is shown by order: the answers are there while the receiver has not taken a single span.
"""

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from receiver import Mode, Receiver

from serve_app.telemetry import names

MODEL = "simulated"
CLIENTS, REQUESTS, TOKENS = 8, 160, 4
QUEUE = 512  # fewer than the gateway's spans of that many requests
HOPS = {"gateway", "tokenizer", "postprocess", "engine"}
SPANS_PER_REQUEST = len(names.STAGES) - 1 + 3  # all but the transfer of KV blocks, and one for each hop's work

Trouble = Callable[[Receiver], None]


def down(receiver: Receiver) -> None:
    receiver.stop()


def in_mode(mode: Mode) -> Trouble:
    def change(receiver: Receiver) -> None:
        receiver.mode = mode

    return change


TROUBLES = {
    "down": down,
    "slow": in_mode("slow"),
    "refuse": in_mode("refuse"),
    "refuse_for_good": in_mode("refuse_for_good"),
}


def chat(client: openai.OpenAI, number: int, **headers: str) -> None:
    """A whole request, streamed or not, with everything that its client was promised; the client raises on an error."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"request {number}"}],
        "max_tokens": TOKENS,
        "extra_headers": headers,
    }
    if number % 2:
        answer = client.chat.completions.create(**asked)
        assert answer.usage.completion_tokens == TOKENS
        assert answer.choices[0].finish_reason == "length"
        return
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens == TOKENS
    assert chunks[-1].choices[0].finish_reason == "length"


def many(service: Any) -> None:
    with service.client() as client, ThreadPoolExecutor(CLIENTS) as threads:
        list(threads.map(lambda number: chat(client, number), range(REQUESTS)))


def total(service: Any, metric: str) -> float:
    return sum(one.value for one in service.meter.observations if one.metric == metric)


def chats_until_a_trace_is_whole(service: Any, receiver: Receiver) -> int:
    """How many it took: each hop finds the receiver again by itself, and drops what it was trying to send meanwhile."""
    for count in range(1, 41):
        trace_id = uuid.uuid4().hex
        with service.client() as client:
            chat(client, count, traceparent=f"00-{trace_id}-{uuid.uuid4().hex[:16]}-01")
        try:
            receiver.wait_for(
                lambda spans, wanted=trace_id: sum(one.trace_id == wanted for one in spans) == SPANS_PER_REQUEST, 0.5
            )
        except AssertionError:
            continue
        assert {one.service for one in receiver.spans() if one.trace_id == trace_id} == HOPS
        return count
    raise AssertionError("no trace arrives any more")


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_no_client_notices_a_receiver_in_trouble_and_it_is_found_again(
    serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str, protocol: str
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    # Below the first wait before a second attempt; a slow receiver holds its answer for as long as the test wants.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "120" if trouble == "slow" else "0.5")
    with Receiver() as receiver:
        receiver.slow_s = 120.0
        endpoint = receiver.grpc_url if protocol == "grpc" else receiver.http_url
        service = serve({"tracing": {"endpoint": endpoint, "protocol": protocol, "max_queued_spans": QUEUE}})
        tracings = service.tracings.values()
        TROUBLES[trouble](receiver)

        many(service)
        assert receiver.spans() == []
        assert sum(one.exported_spans for one in tracings) == 0
        dropped = service.tracings["gateway"].dropped_spans
        assert dropped >= 4 * (REQUESTS - CLIENTS) - QUEUE > 0
        service.report()
        assert total(service, "tokenline_dropped_spans") >= dropped
        assert total(service, "tokenline_requests") >= REQUESTS - CLIENTS

        receiver.mode = "normal"
        if trouble == "down":
            receiver.start()
        again = chats_until_a_trace_is_whole(service, receiver)

        for one in tracings:
            one.shutdown(30.0)
        service.report()
        exported, lost = (total(service, f"tokenline_{what}_spans") for what in ("exported", "dropped"))
        assert exported == len(receiver.spans())
        assert exported + lost == SPANS_PER_REQUEST * (REQUESTS + again)
        assert total(service, "tokenline_requests") == REQUESTS + again
        assert len([one for one in caplog.records if one.name.startswith("opentelemetry")]) < 10


def test_a_path_whose_receiver_never_was_there_is_ready_and_remembers_its_requests(serve: Any) -> None:
    with Receiver() as receiver:
        endpoint = receiver.grpc_url
    service = serve({"tracing": {"endpoint": endpoint}})
    with service.client() as client:
        chat(client, 0)
    for route in ("/health", "/ready"):
        assert httpx.get(f"{service.url}{route}").status_code == 200
    (request,) = service.requests()
    assert (request.outcome, request.sampled) == ("ok", True)
    for one in service.tracings.values():
        one.shutdown(0.1)
