"""Traces and accounts of the running application on real vLLM, at a real OTLP receiver."""

import asyncio
import random
import statistics
import time
import uuid
from typing import Any

import httpx
import msgspec
import openai
import pytest
from prometheus import prometheus
from receiver import ReceivedSpan, Receiver
from trace_tree import CHAT as CHAT_TREE
from trace_tree import CHAT_SPANS, tree

from serve_app.launch import Service
from serve_app.messages import RequestMetrics
from serve_app.telemetry.account import account

MODEL = "SmolLM2-135M-Instruct"
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 8,
    "stream": True,
}
CLIENTS = 8
REQUESTS = 200

pytestmark = pytest.mark.timeout(900)


def trace_of(receiver: Receiver, trace_id: str, *needed: str) -> dict[str, ReceivedSpan]:
    """The trace's spans by name, once those named and the gateway's are there."""
    wanted = {"gateway", *needed}
    receiver.wait_for(lambda spans: wanted <= {one.name for one in spans if one.trace_id == trace_id}, 30.0)
    return {one.name: one for one in receiver.spans() if one.trace_id == trace_id}


def test_a_streaming_chat_is_one_trace_under_the_clients_span(http: httpx.Client, receiver: Receiver) -> None:
    trace_id, caller = uuid.uuid4().hex, uuid.uuid4().hex[:16]
    answer = http.post("/v1/chat/completions", json=CHAT, headers={"traceparent": f"00-{trace_id}-{caller}-01"})
    assert answer.status_code == 200
    spans = trace_of(receiver, trace_id, *CHAT_SPANS)
    by_id = {one.span_id: one for one in spans.values()}
    assert tree(spans.values()) == CHAT_TREE
    assert spans["gateway"].parent_id == caller
    assert answer.headers["traceparent"] == f"00-{trace_id}-{spans['gateway'].span_id}-01"
    for one in spans.values():
        assert one.status == "unset", one
        assert one.resource["service.namespace"] == "tokenline"
        assert one.resource["tokenline.model"] == MODEL
        if one.name != "gateway":
            parent = by_id[one.parent_id or ""]
            assert parent.start_s <= one.start_s <= one.end_s <= parent.end_s, (one, parent)
    assert spans["engine.queue"].end_s == spans["prefill"].start_s
    assert spans["prefill"].end_s == spans["decode"].start_s
    replicas = {one.service: one.resource["service.instance.id"] for one in spans.values()}
    assert len(set(replicas.values())) == 4
    gateway = spans["gateway"].attributes
    assert gateway["gen_ai.operation.name"] == "chat"
    assert gateway["gen_ai.request.model"] == gateway["gen_ai.response.model"] == MODEL
    assert gateway["gen_ai.request.stream"] is True
    assert gateway["gen_ai.response.finish_reasons"] == ["stop"]
    assert gateway["gen_ai.usage.output_tokens"] == spans["decode"].attributes["tokenline.tokens"] == 8
    assert gateway["gen_ai.response.time_to_first_chunk"] > 0
    assert gateway["tokenline.request_id"] == answer.headers["x-request-id"]


def test_an_unsampled_request_yields_no_span(http: httpx.Client, receiver: Receiver) -> None:
    unsampled, sampled = uuid.uuid4().hex, uuid.uuid4().hex
    for trace_id, flags in ((unsampled, "00"), (sampled, "01")):
        headers = {"traceparent": f"00-{trace_id}-{'2' * 16}-{flags}"}
        assert http.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
    trace_of(receiver, sampled, *CHAT_SPANS)
    assert not [one for one in receiver.spans() if one.trace_id == unsampled]


def test_a_client_that_leaves_is_seen_in_every_hop(http: httpx.Client, receiver: Receiver) -> None:
    trace_id = uuid.uuid4().hex
    headers = {"traceparent": f"00-{trace_id}-{'3' * 16}-01"}
    body = CHAT | {"max_tokens": 2000, "ignore_eos": True}
    with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        next(answer.iter_bytes())
    spans = trace_of(receiver, trace_id, "postprocess", "decode")
    assert spans["gateway"].attributes["error.type"] == "client_disconnected"
    assert spans["postprocess"].attributes["error.type"] == "cancelled"
    assert spans["decode"].attributes["tokenline.cancelled"] is True
    assert 0 < spans["decode"].attributes["tokenline.tokens"] < 2000


def test_of_200_mixed_requests_the_hops_account_for_all_but_a_few_percent(
    vllm_service: Service, http: httpx.Client
) -> None:
    asked = asyncio.run(ask_all(vllm_service.url))
    requests = latest(http, set(asked))
    shares = []
    for request in requests:
        assert request.outcome == "ok", request
        numbers = account(request)
        assert sum(numbers.parts.values()) == pytest.approx(numbers.e2e_s, abs=1e-6)
        assert min(numbers.parts.values()) >= 0
        shares.append(numbers.unaccounted_s / numbers.e2e_s)
    cuts = statistics.quantiles(shares, n=100)
    lengths = [account(request).length for request in requests]
    print(  # noqa: T201 - the distribution, with pytest -s
        f"\nunaccounted share of {len(shares)} requests ({CLIENTS} clients, "
        + ", ".join(f"{lengths.count(name)} {name}" for name in sorted(set(lengths)))
        + "): "
        + ", ".join(f"p{at} {cuts[at - 1]:.2%}" for at in (1, 10, 25, 50, 75, 90, 99))
        + f", min {min(shares):.2%}, max {max(shares):.2%}"
    )
    assert {"short", "medium", "long"} <= set(lengths)
    assert statistics.median(shares) < 0.05


async def ask_all(url: str) -> list[str]:
    """The ids of 200 requests: seven tenths short, two medium, one long; half of them streams; eight at a time."""
    numbers = random.Random(3)
    # The longer ones share their beginning, as conversations do: two cores would compute them for minutes.
    book = [numbers.choice(WORDS) for _ in range(1200)]
    prefixes = [book[:0]] * 140 + [book[:400]] * 40 + [book] * 20
    numbers.shuffle(prefixes)
    places = asyncio.Semaphore(CLIENTS)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:

        async def ask(number: int, prefix: list[str]) -> str:
            request_id = f"mixed-{uuid.uuid4().hex}"
            text = " ".join([*prefix, f"Request {number}:", *(numbers.choice(WORDS) for _ in range(10 + number % 20))])
            options: dict[str, Any] = {
                "model": MODEL,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 2 + number % 3,
                "extra_headers": {"x-request-id": request_id},
                "extra_body": {"ignore_eos": True},
            }
            async with places:
                if number % 2:
                    async for _ in await client.chat.completions.create(**options, stream=True):
                        pass
                else:
                    await client.chat.completions.create(**options)
            return request_id

        return await asyncio.gather(*(ask(number, prefix) for number, prefix in enumerate(prefixes)))


WORDS = ["river", "stone", "light", "early", "market", "silent", "engine", "garden", "number", "window"]


def latest(http: httpx.Client, ids: set[str]) -> list[RequestMetrics]:
    """Those requests from the insight, which hears of them within a second or two."""
    found: dict[str, RequestMetrics] = {}
    for _ in range(100):
        answer = http.get("/insight/requests", params={"last": 10_000})
        requests = msgspec.json.decode(answer.content, type=list[RequestMetrics])
        found = {request.request_id: request for request in requests if request.request_id in ids}
        if len(found) == len(ids):
            break
        time.sleep(0.1)
    assert len(found) == len(ids)
    return list(found.values())


def test_vllms_own_metrics_are_scraped_beside_ours(vllm_service: Service, http: httpx.Client) -> None:
    with prometheus(vllm_service.metrics_url) as server:
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        for name in VLLM_METRICS:
            server.wait(name, bool, 30.0)
        (ours,) = server.wait("sum(ray_tokenline_engine_prefix_query_tokens_total)", bool, 30.0)
        assert ours.value > 0
        assert not server.query("ray_tokenline_gpu_compute_ratio")  # absent, not zero, on a machine without a GPU


VLLM_METRICS = (
    "ray_vllm_generation_tokens_total",
    "ray_vllm_prompt_tokens_total",
    "ray_vllm_time_to_first_token_seconds_bucket",
    "ray_vllm_request_queue_time_seconds_bucket",
)
