"""A request's own timings in its answer, and what is remembered of it, over HTTP with the official client."""

import json
import logging
import re
from typing import Any

import httpx
import openai
import pytest
from raw_http import post

from serve_app.messages import LoadReport
from serve_app.telemetry.account import account

MODEL = "simulated"
ASK = {"X-Include-Timings": "1"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "Once } upon {", "max_tokens": 6}
BODIES = {
    "chat": ("/v1/chat/completions", CHAT),
    "two choices": ("/v1/chat/completions", CHAT | {"n": 2}),
    "logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    "completion": ("/v1/completions", COMPLETION),
    "echo": ("/v1/completions", COMPLETION | {"echo": True, "logprobs": 1}),
    "prompts": ("/v1/completions", COMPLETION | {"prompt": ["a }", "b"], "n": 2}),
    "scored prompt": ("/v1/completions", COMPLETION | {"echo": True, "max_tokens": 0}),
    "stop string": ("/v1/completions", COMPLETION | {"stop": ["never, never"]}),
}


def check(timings: dict[str, Any], tokens: int, streamed: bool) -> None:
    """What holds for any request's timings."""
    assert sum(timings["parts_ms"].values()) == pytest.approx(timings["e2e_ms"], abs=0.05)
    assert min(timings["parts_ms"].values()) >= 0
    assert 0 < timings["ttft_ms"] <= timings["e2e_ms"]
    assert timings["completion_tokens"] == tokens
    stages = {stage["name"] for stage in timings["stages"]}
    assert {"gateway.auth", "gateway.read", "tokenizer.queue", "engine.queue", "prefill", "decode"} <= stages
    assert ("gateway.write" in stages) == streamed  # of a whole answer nothing has been written yet
    assert re.fullmatch("[0-9a-f]{32}", timings["trace_id"])


@pytest.mark.parametrize("name", BODIES)
def test_a_whole_answer_has_them_as_a_field_and_as_a_header(path: Any, name: str) -> None:
    url, body = BODIES[name]
    without = httpx.post(path.url + url, json=body).json()
    answer = httpx.post(path.url + url, json=body, headers=ASK)
    assert int(answer.headers["content-length"]) == len(answer.content)
    whole = answer.json()
    check(timings := whole.pop("timings"), whole["usage"]["completion_tokens"], streamed=False)
    assert timings["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert whole.keys() == without.keys()
    assert whole["choices"] == without["choices"]
    entries = dict(entry.split(";dur=") for entry in answer.headers["server-timing"].split(", "))
    total = float(entries.pop("total"))
    assert sum(map(float, entries.values())) == pytest.approx(total, abs=0.05)
    assert set(entries) == set(timings["parts_ms"])


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_a_stream_has_them_in_its_last_chunk(path: Any, name: str, include_usage: bool) -> None:
    url, body = BODIES[name]
    body = body | {"stream": True} | ({"stream_options": {"include_usage": True}} if include_usage else {})
    answer = httpx.post(path.url + url, json=body, headers=ASK)
    assert "server-timing" not in answer.headers
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    last = chunks[-1]
    assert last["choices"] == []
    assert ("usage" in last) == include_usage
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    assert not [chunk for chunk in chunks[:-1] if "timings" in chunk]
    check(
        last["timings"],
        last["usage"]["completion_tokens"] if include_usage else last["timings"]["completion_tokens"],
        True,
    )


def test_the_official_client_reads_both(path: Any, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT, extra_headers=ASK)
    assert whole.model_extra["timings"]["completion_tokens"] == 6
    *_, last = client.chat.completions.create(**CHAT, stream=True, extra_headers=ASK)
    assert last.model_extra["timings"]["completion_tokens"] == 6


def test_the_official_client_reads_all_else_as_ever(path: Any, client: openai.OpenAI) -> None:
    plain = client.completions.create(**COMPLETION, n=2, logprobs=1)
    whole = client.completions.create(**COMPLETION, n=2, logprobs=1, extra_headers=ASK)
    assert (whole.choices, whole.usage) == (plain.choices, plain.usage)
    chunks = list(client.completions.create(**COMPLETION, n=2, stream=True, extra_headers=ASK))
    texts = ["".join(one.text for chunk in chunks for one in chunk.choices if one.index == index) for index in (0, 1)]
    assert texts == [choice.text for choice in plain.choices]
    assert [bool((chunk.model_extra or {}).get("timings")) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("stream", [False, True])
def test_braces_in_what_was_generated_are_left_alone(serve: Any, stream: bool) -> None:
    service = serve({"engine": {"sim": {"source": "echo"}}})
    text = 'a } "b": {c}}'
    ids = service.ids(text)
    body = {"model": MODEL, "prompt": list(ids), "max_tokens": len(ids), "stream": stream}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, headers=ASK)
    parts = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.endswith("}")]
    assert "".join(choice["text"] for part in parts for choice in part["choices"]) == text
    assert [part["timings"]["completion_tokens"] for part in parts if "timings" in part] == [len(ids)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_costs_decoding_none_of_its_time(serve: Any, stream: bool) -> None:
    service = serve({"engine": {"sim": {"step_ms": 5.0}}})
    body = COMPLETION | {"max_tokens": 40}
    free = httpx.post(f"{service.url}/v1/completions", json=body).json()["choices"][0]["text"]
    asked = body | {"max_tokens": 4000, "stop": free[40:48], "stream": stream}
    answer = httpx.post(f"{service.url}/v1/completions", json=asked, headers=ASK | {"x-request-id": f"stop-{stream}"})
    assert '"finish_reason":"stop"' in answer.text
    (choice,) = (request := remembered(service, f"stop-{stream}")).choices
    (decode,) = [one for one in request.stages if one.name == "decode"]
    assert (request.outcome, choice.finish_reason, choice.stop_string) == ("ok", "stop", True)
    assert choice.tokens > 5
    assert decode.busy_s == choice.last_token_s - choice.first_token_s >= 0.005 * (choice.tokens - 1)


def test_who_does_not_ask_gets_none(path: Any) -> None:
    for headers in ({}, {"X-Include-Timings": "0"}):
        answer = httpx.post(f"{path.url}/v1/chat/completions", json=CHAT, headers=headers)
        assert "timings" not in answer.json()
        assert "server-timing" not in answer.headers


@pytest.mark.parametrize("value", ["2", "true", "", "1, 1"])
def test_another_value_is_refused_by_name(path: Any, value: str) -> None:
    answer = httpx.post(f"{path.url}/v1/chat/completions", json=CHAT, headers={"X-Include-Timings": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Include-Timings")


def test_a_refusal_has_its_timings_in_the_header(path: Any) -> None:
    answer = httpx.post(f"{path.url}/v1/chat/completions", json=CHAT | {"top_p": 3}, headers=ASK)
    assert answer.status_code == 400
    assert "gateway.read;dur=" in answer.headers["server-timing"]


@pytest.mark.parametrize(
    ("change", "status"), [({"model": "other"}, 404), ({"max_tokens": 9000}, 400), ({"n": 1000}, 400)]
)
def test_every_refusal_has_its_timings_and_is_else_the_same(path: Any, change: dict[str, Any], status: int) -> None:
    plain = httpx.post(f"{path.url}/v1/chat/completions", json=CHAT | change)
    asked = httpx.post(f"{path.url}/v1/chat/completions", json=CHAT | change, headers=ASK)
    assert plain.status_code == asked.status_code == status
    assert plain.json() == asked.json()
    assert "server-timing" not in plain.headers
    assert "total;dur=" in asked.headers["server-timing"]


def test_tokenizing_refuses_another_value_too(path: Any) -> None:
    for url, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [40]})):
        answer = httpx.post(path.url + url, json=body, headers={"X-Include-Timings": "yes"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Include-Timings")
        assert "total;dur=" in httpx.post(path.url + url, json=body, headers=ASK).headers["server-timing"]


def test_an_engine_that_fails_amid_a_stream_leaves_no_timings(serve: Any) -> None:
    service = serve({"engine": {"sim": {"fail_after_tokens": 3}}})
    answer = httpx.post(f"{service.url}/v1/chat/completions", json=CHAT | {"stream": True}, headers=ASK)
    assert answer.text.count("event: error") == 1
    assert "timings" not in answer.text
    whole = httpx.post(f"{service.url}/v1/chat/completions", json=CHAT, headers=ASK)
    assert whole.status_code == 500
    assert "decode;dur=" in whole.headers["server-timing"]


def test_tokenizing_has_its_timings_in_the_header(path: Any) -> None:
    answer = httpx.post(f"{path.url}/tokenize", json={"prompt": "one two"}, headers=ASK)
    assert "tokenizer.encode;dur=" in answer.headers["server-timing"]
    assert "timings" not in answer.json()


# What is remembered.


def remembered(service: Any, request_id: str) -> Any:
    """The one record of it. A request is over some turns of the event loop after its client has the last byte."""
    found: Any = ()
    while not found:  # until pytest's own limit
        found = service.requests(id=request_id)
    (request,) = found
    return request


def test_each_request_is_remembered_once_with_what_came_of_it(path: Any) -> None:
    def post(request_id: str, body: dict[str, Any], url: str = "/v1/chat/completions") -> httpx.Response:
        return httpx.post(path.url + url, json=body, headers={"x-request-id": request_id})

    usage = post("remember-whole", CHAT).json()["usage"]
    post("remember-stream", CHAT | {"stream": True})
    post("remember-field", CHAT | {"top_p": 3})
    post("remember-model", CHAT | {"model": "no-such-model"})
    post("remember-long", CHAT | {"max_tokens": 9000})
    post("remember-ids", {"prompt": "x"}, "/tokenize")
    whole, stream = remembered(path, "remember-whole"), remembered(path, "remember-stream")
    assert (whole.stream, stream.stream) == (False, True)
    for request in (whole, stream):
        assert (request.outcome, request.error, request.status) == ("ok", None, 200)
        assert request.prompt_tokens == usage["prompt_tokens"]
        assert request.completion_tokens == usage["completion_tokens"] == request.choices[0].tokens
        assert request.choices[0].finish_reason == "length"
        assert request.arrived_s < request.choices[0].first_token_s <= request.choices[0].last_token_s < request.ended_s
    for request_id, error, status, model in (
        ("remember-field", "invalid_value", 400, MODEL),
        ("remember-model", "model_not_found", 404, ""),
        ("remember-long", "context_length_exceeded", 400, MODEL),
    ):
        request = remembered(path, request_id)
        assert (request.outcome, request.error, request.status, request.model) == ("invalid", error, status, model)
        assert request.completion_tokens is None
    assert remembered(path, "remember-ids").operation == "tokenize"


def test_the_warm_up_is_nobodys_request(serve: Any) -> None:
    service = serve({"gateway": {"max_stops": 4}})
    assert service.requests() == ()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("sim", "timeout_s", "error", "status", "outcome"),
    [
        ({"fail_after_tokens": 3}, 600.0, "internal_error", 500, "error"),
        ({"die_after_tokens": 5}, 600.0, "engine_died", 503, "error"),
        ({"stall_after_tokens": 3}, 0.4, "deadline_exceeded", 504, "timeout"),
    ],
    ids=["failure", "death", "deadline"],
)
def test_a_request_that_failed_is_remembered_once_with_its_tokens_and_all_of_its_time(
    serve: Any, sim: dict[str, int], timeout_s: float, error: str, status: int, outcome: str, stream: bool
) -> None:
    async def load() -> LoadReport:
        return LoadReport(0, 0, 0.0, 1)

    # A service of its own for each: a dead engine stays dead. This one has made two tokens of the warm-up.
    service = serve({"engine": {"sim": sim}, "gateway": {"request_timeout_s": timeout_s, "max_stops": 5 + stream}})
    body = CHAT | {"stream": stream}
    service.watched.load = load  # a gateway's report asks no engine; that of this path in one process does
    answer = httpx.post(f"{service.url}/v1/chat/completions", json=body, headers={"x-request-id": "failed"})
    assert answer.status_code == (200 if stream else status)
    request = remembered(service, "failed")
    assert (request.outcome, request.error, request.status) == (outcome, error, status)
    assert service.requests() == (request,)
    (choice,) = request.choices
    assert (choice.tokens, request.completion_tokens, choice.finish_reason) == (3, 3, None)
    found = account(request)
    assert sum(found.parts.values()) == pytest.approx(found.e2e_s)
    if error == "deadline_exceeded":
        # The engine was at it all the while; the rest is two hops and the last word.
        assert found.parts["decode"] >= 0.5 * timeout_s
        assert choice.last_token_s < request.arrived_s + timeout_s


def test_a_failed_engines_words_are_with_nobody(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    service = serve({"engine": {"sim": {"fail_after_tokens": 2}}})
    secret = "the secret of mine"
    body = CHAT | {"messages": [{"role": "user", "content": secret}], "stop": ["my stop string"], "user": "my name"}
    with caplog.at_level(logging.INFO, "serve_app"):
        httpx.post(f"{service.url}/v1/chat/completions", json=body)
        httpx.post(f"{service.url}/v1/chat/completions", json=body | {"messages": secret})
        httpx.post(f"{service.url}/v1/chat/completions", json=body | {"model": secret})
        httpx.post(f"{service.url}/v1/chat/completions", json=body | {secret: secret})
        httpx.post(f"{service.url}/v1/chat/completions", json=body | {"messages": [{"role": secret, "content": ""}]})
        remembered_all = ""
        while remembered_all.count("RequestMetrics(") < 5:
            remembered_all = repr(service.requests())
    lines = [repr(record.__dict__) for record in caplog.records]
    assert len([line for line in lines if "'outcome'" in line]) == 5
    told = "\n".join([*lines, remembered_all, repr(service.meter.observations), caplog.text])
    for words in (secret, "my stop string", "my name"):
        assert words not in told


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_left_is_remembered_as_such(serve: Any, stream: bool) -> None:
    service = serve({"engine": {"sim": {"step_ms": 5.0}}})
    request_id = f"left-{stream}"
    before = len(service.requests())
    raw = json.dumps(CHAT | {"max_tokens": 4000, "stream": stream}).encode()
    with service.connect() as leaver:
        leaver.sendall(post("/v1/chat/completions", raw, request_id))
        service.wait_busy()
    service.wait_idle()
    request = remembered(service, request_id)
    assert (request.outcome, request.error, request.status) == ("disconnected", "client_disconnected", 499)
    assert len(service.requests()) == before + 1


def test_a_client_that_leaves_amid_its_body_is_remembered_as_such(path: Any) -> None:
    with path.connect() as leaver:
        leaver.sendall(post("/v1/chat/completions", b'{"model":' + b" " * 1000, "left-amid-body")[:-1000])
    request = remembered(path, "left-amid-body")
    assert (request.outcome, request.status, request.choices) == ("disconnected", 499, ())


def test_a_client_that_closes_once_it_has_all_did_not_leave(path: Any) -> None:
    for number in range(20):
        body = json.dumps(CHAT | {"stream": True, "max_tokens": 2}).encode()
        with path.connect() as client:
            client.sendall(post("/v1/chat/completions", body, f"all-{number}"))
            received = b""
            while b"[DONE]" not in received:
                received += client.recv(65536)
    path.wait_idle()
    assert {remembered(path, f"all-{number}").outcome for number in range(20)} == {"ok"}


@pytest.mark.parametrize("query", ["last=0", "last=x", "last=10001", "last=-1", "newest=3"])
def test_a_wrong_query_is_refused_by_name(path: Any, query: str) -> None:
    answer = httpx.get(f"{path.url}/insight/requests?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.split("=")[0])


def test_the_page_is_locked_where_there_is_a_key(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    key = tmp_path_factory.mktemp("key") / "admin"
    key.write_text("correct horse\n")
    service = serve({"gateway": {"admin_key_file": str(key)}})
    for route in ("/insight", "/insight/data", "/insight/requests"):
        refused = httpx.get(service.url + route)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"].startswith("Basic ")
        assert httpx.get(service.url + route, headers={"authorization": "Bearer wrong"}).status_code == 401
        assert httpx.get(service.url + route, headers={"authorization": "Bearer correct horse"}).status_code == 200
        assert httpx.get(service.url + route, auth=("anybody", "correct horse")).status_code == 200
        assert httpx.get(service.url + route, auth=("anybody", "wrong")).status_code == 401
        assert httpx.get(service.url + route, headers={"authorization": "Basic %%%"}).status_code == 401
    page = httpx.get(f"{service.url}/insight", auth=("a", "correct horse"))
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["cache-control"] == "no-store"
    assert httpx.post(f"{service.url}/v1/chat/completions", json=CHAT).status_code == 200
