"""The server span's attributes: OpenTelemetry's names, and nobody's words unless the configuration says so."""

import json
from typing import Any

import pytest

from serve_app.config import GatewaySection
from serve_app.errors import ModelNotFound
from serve_app.gateway.attributes import request_attributes, response_attributes
from serve_app.gateway.inbound import from_chat, from_completion
from serve_app.gateway.recording import Recording
from serve_app.gateway.schema import ChatBody, CompletionBody, MessageBody
from serve_app.messages import ChoiceMetrics, GenerateSummary
from serve_app.telemetry.account import account
from serve_app.telemetry.span_values import clean

LIMITS = GatewaySection()
MESSAGES = [MessageBody(role="user", content="my words", name="myself")]


def recording(**inbound: Any) -> Recording:
    made = Recording("the-id", "chat", "m", 100.0)
    if inbound:
        made.inbound = from_chat(ChatBody(model="m", messages=MESSAGES, **inbound), LIMITS)
    return made


def response_of(made: Recording) -> dict[str, Any]:
    metrics = made.metrics()
    return clean(response_attributes(made, metrics, account(metrics)))


def test_before_the_body_was_read_the_span_has_what_the_path_says() -> None:
    assert request_attributes(recording(), capture_content=True) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tokenline",
        "http.request.method": "POST",
        "tokenline.request_id": "the-id",
    }


def test_what_was_asked_for_has_opentelemetrys_names() -> None:
    made = recording(stop=["my stop"], n=2, temperature=0.5, top_p=0.25, seed=3, max_tokens=9, stream=True, user="me")
    attributes = request_attributes(made, capture_content=False)
    assert {key: value for key, value in attributes.items() if key.startswith("gen_ai.request.")} == {
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": True,
    }
    assert not any(words in repr(attributes) for words in ("my words", "my stop", "myself", "'me'"))


def test_what_was_not_said_is_no_attribute() -> None:
    attributes = clean(request_attributes(recording(n=1), capture_content=False))
    assert not {"gen_ai.request.max_tokens", "gen_ai.request.seed"} & set(attributes)


def test_prompts_and_stop_strings_are_on_it_where_the_configuration_says_so() -> None:
    attributes = request_attributes(recording(stop="my stop"), capture_content=True)
    assert json.loads(attributes["gen_ai.input.messages"]) == [
        {"role": "user", "content": "my words", "name": "myself"}
    ]
    assert attributes["gen_ai.request.stop_sequences"] == ["my stop"]


@pytest.mark.parametrize(
    ("prompt", "captured"), [("text", ["text"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2]], [[1], [2]])]
)
def test_a_completions_prompts_are_captured_as_they_came(prompt: Any, captured: Any) -> None:
    made = recording()
    made.inbound = from_completion(CompletionBody(model="m", prompt=prompt), LIMITS)
    attributes = request_attributes(made, capture_content=True)
    assert json.loads(attributes["gen_ai.input.messages"]) == captured
    assert "gen_ai.input.messages" not in request_attributes(made, capture_content=False)


def test_neither_a_prompt_nor_a_models_name_makes_a_span_as_long_as_they_are() -> None:
    made = recording()
    made.inbound = from_completion(CompletionBody(model="m" * 100_000, prompt="€" * 100_000), LIMITS)
    attributes = request_attributes(made, capture_content=True)
    assert len(attributes["gen_ai.input.messages"]) == 32_768
    assert attributes["gen_ai.request.model"] == "m" * 256


def test_what_came_of_it_has_opentelemetrys_names() -> None:
    made = recording(stream=True)
    made.status = 200
    made.wrote(101.0, 102.0)
    choices = (ChoiceMetrics(3, 101.0, 103.0, 1.5, "length"), ChoiceMetrics(2, 101.0, 102.0, 0.5, "stop", True))
    made.summarise(GenerateSummary((), choices, 250, 5, 16), 100.0)
    made.wrote(103.0, 104.0)
    made.whole = True
    assert response_of(made) == {
        "http.response.status_code": 200,
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ["length", "stop"],
        "gen_ai.response.time_to_first_chunk": 2.0,
        "gen_ai.usage.input_tokens": 250,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "tokenline.outcome": "ok",
        "tokenline.length": "medium",
        "tokenline.stop_string": True,
        "tokenline.tpot_s": 1.0,
        "tokenline.longest_gap_s": 1.5,
        "tokenline.unaccounted_s": 2.0,
    }


def test_what_never_happened_is_no_attribute() -> None:
    attributes = response_of(recording())
    assert set(attributes) == {
        "gen_ai.response.model",
        "tokenline.outcome",
        "tokenline.length",
        "tokenline.unaccounted_s",
    }
    assert (attributes["tokenline.outcome"], attributes["tokenline.length"]) == ("disconnected", "unknown")


def test_a_model_that_is_not_served_did_not_respond() -> None:
    made = recording(n=1)
    made.fail(ModelNotFound("model: 'x' is not served here"))
    assert "gen_ai.response.model" not in response_of(made)
    assert "finish_reasons" not in repr(response_of(made))
