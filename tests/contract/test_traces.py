"""One trace per request, at a real OTLP receiver: the tree, what ends a request, and nobody's words on it."""

import json
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import openai
import pytest
from receiver import ReceivedSpan, Receiver
from trace_tree import CHAT as CHAT_TREE
from trace_tree import CHAT_SPANS, tree

from serve_app.errors import Overloaded
from serve_app.messages import EngineDelta, EngineRequest
from serve_app.telemetry import names

MODEL = "simulated"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "A secret of mine"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def traced(serve: Any, receiver: Receiver) -> Any:
    return serve({"tracing": {"endpoint": receiver.grpc_url}})


class Trace:
    """A trace that the test chose the id of, so that others in flight do not matter."""

    def __init__(self, receiver: Receiver) -> None:
        self.id = uuid.uuid4().hex
        self.caller = uuid.uuid4().hex[:16]
        self._receiver = receiver

    def headers(self, flags: str = "01") -> dict[str, str]:
        return {"traceparent": f"00-{self.id}-{self.caller}-{flags}"}

    def spans(self, service: Any, *needed: str) -> dict[str, ReceivedSpan]:
        """By name, once those named (the gateway's at least) are there."""
        wanted = {"gateway", *needed}
        self._receiver.wait_for(lambda spans: wanted <= {one.name for one in spans if one.trace_id == self.id}, 20.0)
        return {one.name: one for one in self._receiver.spans() if one.trace_id == self.id}


@pytest.fixture
def trace(receiver: Receiver) -> Trace:
    return Trace(receiver)


def stream(service: Any, body: dict[str, Any], headers: dict[str, str]) -> str:
    answer = httpx.post(f"{service.url}/v1/chat/completions", json=body | {"stream": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.text


def test_a_streaming_chat_is_one_trace_with_every_stage(traced: Any, trace: Trace) -> None:
    stream(traced, CHAT, trace.headers())
    spans = trace.spans(traced, *CHAT_SPANS)
    assert tree(spans.values()) == CHAT_TREE
    assert spans["gateway"].parent_id == trace.caller
    for one in spans.values():
        assert one.status == "unset", one
        if one.name != "gateway":
            parent = next(other for other in spans.values() if other.span_id == one.parent_id)
            assert parent.start_s <= one.start_s <= one.end_s <= parent.end_s, (one, parent)
    gateway = spans["gateway"].attributes
    assert gateway["gen_ai.operation.name"] == "chat"
    assert gateway["gen_ai.provider.name"] == "tokenline"
    assert gateway["gen_ai.request.model"] == gateway["gen_ai.response.model"] == MODEL
    assert gateway["gen_ai.request.max_tokens"] == gateway["gen_ai.usage.output_tokens"] == 4
    assert gateway["gen_ai.request.stream"] is True
    assert gateway["gen_ai.usage.input_tokens"] > 4
    assert gateway["gen_ai.response.finish_reasons"] == ["length"]
    assert gateway["http.response.status_code"] == 200
    assert gateway["tokenline.outcome"] == "ok"
    assert gateway["tokenline.length"] == "short"
    others = [one for one in spans.values() if one.name != "gateway"]
    assert not any(key.startswith("gen_ai.usage") for one in others for key in one.attributes)
    assert spans["postprocess.detokenize"].attributes["tokenline.count"] == 4
    assert spans["postprocess"].resource["service.instance.id"] == "postprocess-0"
    assert spans["postprocess"].resource["service.namespace"] == "tokenline"


def test_without_a_traceparent_a_trace_is_begun_and_named_in_the_response(traced: Any, receiver: Receiver) -> None:
    answer = httpx.post(f"{traced.url}/v1/chat/completions", json=CHAT)
    _, trace_id, span_id, flags = answer.headers["traceparent"].split("-")
    assert flags == "01"
    receiver.wait_for(lambda spans: any(one.span_id == span_id for one in spans), 20.0)
    (root,) = [one for one in receiver.spans() if one.span_id == span_id]
    assert (root.name, root.trace_id, root.parent_id) == ("gateway", trace_id, None)


def test_an_unsampled_traceparent_yields_nothing(traced: Any, receiver: Receiver, trace: Trace) -> None:
    answer = httpx.post(f"{traced.url}/v1/chat/completions", json=CHAT, headers=trace.headers("00"))
    assert answer.headers["traceparent"].startswith(f"00-{trace.id}-")
    assert answer.headers["traceparent"].endswith("-00")
    after = Trace(receiver)
    stream(traced, CHAT, after.headers())
    after.spans(traced, *CHAT_SPANS)
    assert not [one for one in receiver.spans() if one.trace_id == trace.id]


def test_choices_have_their_own_engine_spans(traced: Any, receiver: Receiver, trace: Trace) -> None:
    httpx.post(f"{traced.url}/v1/chat/completions", json=CHAT | {"n": 3}, headers=trace.headers())
    receiver.wait_for(
        lambda spans: len([one for one in spans if one.trace_id == trace.id and one.name == "decode"]) == 3, 20.0
    )


def test_tokenize_is_traced_too(traced: Any, trace: Trace) -> None:
    httpx.post(f"{traced.url}/tokenize", json={"prompt": "one two"}, headers=trace.headers())
    spans = trace.spans(traced, "tokenizer.encode")
    assert set(spans) == {
        "gateway", "gateway.auth", "gateway.read", "gateway.write", "tokenizer", "tokenizer.queue", "tokenizer.encode",
    }  # fmt: skip
    assert spans["gateway"].attributes["gen_ai.operation.name"] == "tokenize"


def words_of(spans: dict[str, ReceivedSpan]) -> str:
    return json.dumps([[one.name, one.attributes, one.resource, one.status_message] for one in spans.values()])


def test_nobodys_words_are_on_a_span(traced: Any, trace: Trace) -> None:
    text = stream(traced, CHAT | {"stop": ["my stop string"]}, trace.headers())
    spans = trace.spans(traced, *CHAT_SPANS)
    words = words_of(spans)
    assert "secret" not in words
    assert "my stop string" not in words
    made = "".join(
        choice["delta"].get("content", "")
        for line in text.splitlines()
        if line.startswith("data: {")
        for choice in json.loads(line[6:])["choices"]
    )
    assert made
    assert made not in words


def test_words_are_on_spans_where_the_configuration_says_so(serve: Any, receiver: Receiver, trace: Trace) -> None:
    service = serve({"tracing": {"endpoint": receiver.grpc_url, "capture_content": True}})
    stream(service, CHAT, trace.headers())
    spans = trace.spans(service, *CHAT_SPANS)
    assert "A secret of mine" in spans["gateway"].attributes["gen_ai.input.messages"]
    assert json.loads(spans["postprocess"].attributes["gen_ai.output.messages"])[0]


# How requests end.


def test_a_stop_string_is_marked_and_no_error(traced: Any, trace: Trace, receiver: Receiver) -> None:
    free = httpx.post(f"{traced.url}/v1/completions", json={"model": MODEL, "prompt": "go on", "max_tokens": 40}).json()
    stop = free["choices"][0]["text"][20:26]
    body = {"model": MODEL, "prompt": "go on", "max_tokens": 4000, "stop": stop, "ignore_eos": True}
    answer = httpx.post(f"{traced.url}/v1/completions", json=body, headers=trace.headers()).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    spans = trace.spans(traced, "postprocess", "decode")
    assert spans["gateway"].attributes["tokenline.stop_string"] is True
    assert spans["gateway"].attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert spans["postprocess"].attributes["tokenline.stop_string"] is True
    assert spans["decode"].attributes["tokenline.cancelled"] is True
    assert {one.status for one in spans.values()} == {"unset"}
    assert not [one for one in spans.values() if "error.type" in one.attributes]


def test_a_client_that_leaves_is_marked_in_every_hop(serve: Any, receiver: Receiver, trace: Trace) -> None:
    service = serve({"tracing": {"endpoint": receiver.grpc_url}, "engine": {"sim": {"step_ms": 5.0}}})
    body = CHAT | {"max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{service.url}/v1/chat/completions", json=body, headers=trace.headers()) as answer:
        next(answer.iter_bytes())
    spans = trace.spans(service, "postprocess", "decode")
    gateway = spans["gateway"]
    assert gateway.attributes["error.type"] == names.DISCONNECTED
    assert gateway.attributes["tokenline.outcome"] == "disconnected"
    assert gateway.status == "unset"  # the server did nothing wrong
    assert spans["postprocess"].attributes["error.type"] == "cancelled"
    assert spans["decode"].attributes["tokenline.cancelled"] is True
    (request,) = service.requests(id=trace.id)
    assert (request.outcome, request.error, request.status) == ("disconnected", names.DISCONNECTED, 499)


def test_a_refused_field_is_marked_and_the_hops_were_not_asked(traced: Any, trace: Trace) -> None:
    answer = httpx.post(f"{traced.url}/v1/chat/completions", json=CHAT | {"top_p": 7}, headers=trace.headers())
    assert answer.status_code == 400
    assert answer.headers["traceparent"].startswith(f"00-{trace.id}-")
    spans = trace.spans(traced)
    assert set(spans) == {"gateway", "gateway.auth", "gateway.read", "gateway.write"}
    assert spans["gateway"].attributes["error.type"] == "invalid_value"
    assert spans["gateway"].attributes["tokenline.outcome"] == "invalid"
    assert spans["gateway"].status == "unset"


def test_a_prompt_that_is_too_long_is_marked_where_it_was_refused(traced: Any, trace: Trace) -> None:
    httpx.post(f"{traced.url}/v1/chat/completions", json=CHAT | {"max_tokens": 9000}, headers=trace.headers())
    spans = trace.spans(traced, "tokenizer")
    assert spans["gateway"].attributes["error.type"] == "context_length_exceeded"
    assert spans["tokenizer"].attributes["error.type"] == "context_length_exceeded"


def test_a_full_engine_refuses_and_every_hop_says_so(
    serve: Any, receiver: Receiver, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve({"tracing": {"endpoint": receiver.grpc_url}, "gateway": {"max_stops": 2}})

    async def refuse(request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        raise Overloaded("engine: its queue is full.", "engine", 1.0)
        yield

    monkeypatch.setattr(service.watched.engine, "generate", refuse)
    answer = httpx.post(f"{service.url}/v1/chat/completions", json=CHAT, headers=trace.headers())
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    spans = trace.spans(service, "postprocess", "engine.queue")
    for name in ("gateway", "postprocess", "engine.queue"):
        # It is the client who asks too much: no server failed.
        assert (spans[name].status, spans[name].attributes["error.type"]) == ("unset", "overloaded"), name
    assert spans["gateway"].attributes["tokenline.outcome"] == "refused"


def test_a_cold_path_refuses_and_no_hop_was_asked(
    serve: Any, receiver: Receiver, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve({"tracing": {"endpoint": receiver.grpc_url}, "gateway": {"max_stops": 2}})
    monkeypatch.setattr(service.readiness, "_warm", False)
    assert httpx.post(f"{service.url}/v1/chat/completions", json=CHAT, headers=trace.headers()).status_code == 503
    spans = trace.spans(service)
    assert {one.service for one in spans.values()} == {"gateway"}
    assert (spans["gateway"].status, spans["gateway"].attributes["error.type"]) == ("error", "not_ready")
    assert spans["gateway"].attributes["tokenline.outcome"] == "refused"


def test_a_passed_deadline_is_a_timeout_whose_time_is_accounted_for(
    serve: Any, receiver: Receiver, trace: Trace
) -> None:
    service = serve(
        {
            "tracing": {"endpoint": receiver.grpc_url},
            "gateway": {"request_timeout_s": 0.5},
            "engine": {"sim": {"stall_after_tokens": 0}},
        }
    )
    answer = httpx.post(f"{service.url}/v1/chat/completions", json=CHAT, headers=trace.headers())
    assert answer.status_code == 504
    spans = trace.spans(service, "postprocess", "engine.queue")
    for name in ("gateway", "postprocess", "engine.queue"):
        assert (spans[name].status, spans[name].attributes["error.type"]) == ("error", "deadline_exceeded"), name
    assert spans["gateway"].attributes["tokenline.outcome"] == "timeout"
    (request,) = service.requests(id=trace.id)
    assert names.ENGINE_QUEUE in {one.name for one in request.stages}


def test_an_engine_that_dies_amid_a_stream_is_an_error_in_every_hop(
    serve: Any, receiver: Receiver, trace: Trace
) -> None:
    service = serve(
        {"tracing": {"endpoint": receiver.grpc_url}, "engine": {"sim": {"die_after_tokens": 8, "step_ms": 2.0}}}
    )
    with pytest.raises(openai.APIError), service.client() as client:
        for _ in client.completions.create(
            model=MODEL, prompt="go", max_tokens=500, stream=True, extra_headers=trace.headers()
        ):
            pass
    spans = trace.spans(service, "postprocess", "decode")
    for name in ("gateway", "postprocess", "decode"):
        assert (spans[name].status, spans[name].attributes["error.type"]) == ("error", "engine_died"), name
    assert spans["gateway"].attributes["http.response.status_code"] == 200  # it was sent before the death
    assert spans["gateway"].attributes["tokenline.outcome"] == "error"
