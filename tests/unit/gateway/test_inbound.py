"""What the fields of a body mean together."""

import msgspec
import pytest

from serve_app.config import GatewaySection
from serve_app.errors import InvalidRequest, UnsupportedField
from serve_app.gateway.inbound import Inbound, from_chat, from_completion, from_tokenize
from serve_app.gateway.schema import ChatBody, CompletionBody, TokenizeBody
from serve_app.messages import RequestContext, Tokenized

LIMITS = GatewaySection(max_choices=8, max_stops=2)
CONTEXT = RequestContext("id", 0.0)
HI = [{"role": "user", "content": "hi"}]


def chat(**fields: object) -> Inbound:
    return from_chat(msgspec.convert({"model": "m", "messages": HI} | fields, ChatBody), LIMITS)


def completion(**fields: object) -> Inbound:
    return from_completion(msgspec.convert({"model": "m", "prompt": "hi"} | fields, CompletionBody), LIMITS)


def tokenized(**fields: object) -> Tokenized:
    return msgspec.structs.replace(Tokenized(((1, 2),), (5,), 100, 50), **fields)


def test_absent_and_null_fields_have_openais_defaults() -> None:
    assert chat() == chat(temperature=None, n=None, stop=None, seed=None, stream=None)
    assert chat().sampling.temperature == 1.0
    assert (chat().n, chat().stop, chat().stream, chat().max_tokens) == (1, (), False, None)
    assert completion().max_tokens == 16


def test_a_zero_is_a_value_and_no_absence() -> None:
    sampling = chat(temperature=0, top_k=0, seed=0, presence_penalty=0).sampling
    assert (sampling.temperature, sampling.seed) == (0.0, 0)


def test_max_completion_tokens_counts_and_must_not_contradict_max_tokens() -> None:
    assert chat(max_completion_tokens=7).max_tokens == 7
    assert chat(max_completion_tokens=7, max_tokens=7).max_tokens == 7
    with pytest.raises(InvalidRequest, match="max_tokens: differs"):
        chat(max_completion_tokens=7, max_tokens=8)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stop": ["a", "b", "c"]}, "stop"),
        ({"n": 9}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [*HI, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[1].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
    ],
)
def test_what_a_chat_may_not_ask_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        chat(**fields)
    assert raised.value.param == param
    assert param in raised.value.message


def test_fields_that_ask_for_nothing_are_taken() -> None:
    assert (
        chat(
            tools=[],
            tool_choice="none",
            response_format={"type": "text"},
            modalities=["text"],
            user="u",
            metadata={"a": 1},
            store=True,
            parallel_tool_calls=False,
        )
        == chat()
    )


def test_roles_and_text_parts_become_plain_turns() -> None:
    inbound = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
        ]
    )
    assert inbound.messages is not None
    assert [(turn.role, turn.content, turn.name) for turn in inbound.messages] == [
        ("system", "be brief", None),
        ("user", "a\nb", "Ann"),
        ("assistant", "", None),
    ]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_each_form_of_prompt_is_told_apart(prompt: object, prompts: object) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_mixed_prompts_too_many_choices_and_best_of_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt: "):
        completion(prompt=["a", [1]])
    with pytest.raises(InvalidRequest, match="n: "):
        completion(prompt=["a", "b", "c"], n=3)
    with pytest.raises(UnsupportedField, match="best_of: "):
        completion(best_of=3)
    assert completion(best_of=2, n=2).n == 2


def test_no_tokens_may_be_asked_for_only_with_echo() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens: "):
        completion(max_tokens=0)
    scoring = completion(max_tokens=0, echo=True, logprobs=1)
    assert scoring.tokenize_request(CONTEXT).max_tokens == 1
    assert scoring.generate_request(CONTEXT, tokenized()).discard_output
    assert scoring.sampling.prompt_logprobs == 1


def test_an_echo_is_the_text_as_sent_unless_the_prompt_was_cut_or_was_ids() -> None:
    assert completion(echo=True).generate_request(CONTEXT, tokenized()).echo_texts == ("hi",)
    cut = completion(echo=True, truncate_prompt_tokens=1)
    assert cut.generate_request(CONTEXT, tokenized()).echo_texts == (None,)
    assert completion(echo=True, prompt=[1, 2]).generate_request(CONTEXT, tokenized()).echo_texts == (None,)
    assert completion().generate_request(CONTEXT, tokenized()).echo_texts is None


def test_ids_outside_the_vocabulary_are_named_once_it_is_known() -> None:
    for fields, param in (({"stop_token_ids": [50]}, "stop_token_ids"), ({"logit_bias": {"50": 1}}, "logit_bias")):
        body = msgspec.json.decode(msgspec.json.encode({"model": "m", "messages": HI} | fields), type=ChatBody)
        with pytest.raises(InvalidRequest) as raised:
            from_chat(body, LIMITS).generate_request(CONTEXT, tokenized())
        assert raised.value.param == param


def test_tokenize_takes_either_a_prompt_or_messages() -> None:
    for fields in ({}, {"prompt": "a", "messages": HI}):
        with pytest.raises(InvalidRequest, match="prompt: "):
            from_tokenize(msgspec.convert(fields, TokenizeBody), CONTEXT)
    assert from_tokenize(msgspec.convert({"prompt": ""}, TokenizeBody), CONTEXT).prompts == ("",)
