"""Updates as OpenAI's bytes: chunks and bodies of both kinds, log-probabilities, echo, usage."""

import math
from typing import Any

import msgspec
import pytest

from serve_app.messages import GenerateRequest, RequestContext, RequestKind, Sampling, TokenLogprob
from serve_app.postprocess.choice import ScoredToken, Update
from serve_app.postprocess.render import DONE, Echo, FinishedChoice, Renderer, Usage, renderer_for
from serve_app.vocabulary import Vocabulary

USAGE = Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=4)
USAGE_FIELDS = {
    "prompt_tokens": 5,
    "completion_tokens": 7,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 4},
}
BOTH = pytest.mark.parametrize("kind", list(RequestKind))


@pytest.fixture
def render(context: RequestContext, byte_vocabulary: Vocabulary) -> Any:
    def make(kind: RequestKind, logprobs: int | None = None, include_usage: bool = False) -> Renderer:
        request = GenerateRequest(
            context=context,
            kind=kind,
            model="m",
            created_s=1_700_000_000,
            prompt_ids=((1,),),
            max_tokens=(8,),
            sampling=Sampling(logprobs=logprobs),
            include_usage=include_usage,
        )
        return renderer_for(request, byte_vocabulary)

    return make


def events(raw: bytes) -> list[Any]:
    """The JSON of SSE events, each of which must be one `data:` line and an empty one."""
    *parts, rest = raw.split(b"\n\n")
    assert rest == b""
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    return [msgspec.json.decode(part.removeprefix(b"data: ")) for part in parts]


def scored(byte: int, offset: int, logprob: float = -0.5, top: tuple[tuple[int, float], ...] = ()) -> ScoredToken:
    return ScoredToken(TokenLogprob(byte, logprob, top), offset)


@pytest.mark.parametrize(
    ("kind", "prefix", "chunk_name", "body_name"),
    [
        (RequestKind.CHAT, "chatcmpl-", "chat.completion.chunk", "chat.completion"),
        (RequestKind.COMPLETION, "cmpl-", "text_completion", "text_completion"),
    ],
)
def test_chunks_and_bodies_carry_the_same_envelope(
    render: Any, kind: RequestKind, prefix: str, chunk_name: str, body_name: str
) -> None:
    renderer = render(kind)
    (chunk,) = events(renderer.chunk(0, Update("hi"), None, False))
    body = msgspec.json.decode(renderer.body([], USAGE))
    for fields, name in ((chunk, chunk_name), (body, body_name)):
        assert fields["id"] == f"{prefix}r1"
        assert (fields["object"], fields["model"], fields["created"]) == (name, "m", 1_700_000_000)
    assert body["usage"] == USAGE_FIELDS
    assert "usage" not in chunk


def test_the_first_chat_chunk_carries_the_role_alone_and_the_text_follows(render: Any) -> None:
    role, text = events(render(RequestKind.CHAT).chunk(1, Update("hi"), None, True))
    assert role["choices"] == [
        {"index": 1, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert text["choices"] == [{"index": 1, "delta": {"content": "hi"}, "logprobs": None, "finish_reason": None}]


def test_a_first_chat_chunk_without_text_is_the_role_only(render: Any) -> None:
    (role,) = events(render(RequestKind.CHAT).chunk(0, Update(""), None, True))
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_a_chat_that_ends_without_text_has_a_role_chunk_and_an_empty_last_delta(render: Any) -> None:
    role, last = events(render(RequestKind.CHAT).chunk(0, Update("", (), "stop"), None, True))
    assert role["choices"][0]["finish_reason"] is None
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]


def test_a_completion_chunk_is_text(render: Any) -> None:
    (chunk,) = events(render(RequestKind.COMPLETION).chunk(2, Update("hi", (), "length"), None, True))
    assert chunk["choices"] == [{"index": 2, "text": "hi", "logprobs": None, "finish_reason": "length"}]


@BOTH
def test_every_chunk_has_a_null_usage_where_the_last_one_will_have_it(render: Any, kind: RequestKind) -> None:
    renderer = render(kind, include_usage=True)
    assert all(event["usage"] is None for event in events(renderer.chunk(0, Update("a"), None, True)))
    (usage,) = events(renderer.usage_chunk(USAGE))
    assert (usage["choices"], usage["usage"]) == ([], USAGE_FIELDS)


@BOTH
@pytest.mark.parametrize("text", ["line\nline\r\n\n", "data: [DONE]\n\n", '"\\', "龘𠮷\u2028\x00"])
def test_text_of_any_kind_stays_within_one_event(render: Any, kind: RequestKind, text: str) -> None:
    (chunk,) = events(render(kind).chunk(0, Update(text), None, False))
    choice = chunk["choices"][0]
    assert (choice["text"] if kind is RequestKind.COMPLETION else choice["delta"]["content"]) == text


def test_a_chat_body_holds_messages_and_finish_reasons_in_the_given_order(render: Any) -> None:
    choices = [FinishedChoice(0, "a", (), "stop", None), FinishedChoice(1, "", (), "length", None)]
    body = msgspec.json.decode(render(RequestKind.CHAT).body(choices, USAGE))
    assert body["choices"] == [
        {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": reason,
        }
        for index, text, reason in ((0, "a", "stop"), (1, "", "length"))
    ]


def test_chat_log_probabilities_give_each_tokens_text_bytes_and_alternatives(render: Any) -> None:
    token = scored(0xE9, 0, -0.25, ((0xE9, -0.25), (65, -1.5)))
    (chunk,) = events(render(RequestKind.CHAT, logprobs=2).chunk(0, Update("", (token,)), None, False))
    assert chunk["choices"][0]["delta"] == {"content": ""}
    broken = {"token": "\ufffd", "logprob": -0.25, "bytes": [0xE9]}
    letter = {"token": "A", "logprob": -1.5, "bytes": [65]}
    content = [broken | {"top_logprobs": [broken, letter]}]
    assert chunk["choices"][0]["logprobs"] == {"content": content, "refusal": None}
    body = msgspec.json.decode(
        render(RequestKind.CHAT, logprobs=2).body([FinishedChoice(0, "x", (token,), "stop", None)], USAGE)
    )
    assert body["choices"][0]["logprobs"] == {"content": content, "refusal": None}


def test_a_chat_body_whose_log_probabilities_were_asked_for_has_them_even_without_tokens(render: Any) -> None:
    body = msgspec.json.decode(
        render(RequestKind.CHAT, logprobs=0).body([FinishedChoice(0, "", (), "stop", None)], USAGE)
    )
    assert body["choices"][0]["logprobs"] == {"content": [], "refusal": None}


def test_completion_log_probabilities_are_four_lists_of_one_length(render: Any) -> None:
    tokens = (scored(65, 0, -0.5, ((66, -0.1), (65, -0.5))), scored(66, 1, -3.0, ((67, -0.2),)))
    (chunk,) = events(render(RequestKind.COMPLETION, logprobs=1).chunk(0, Update("AB", tokens), None, False))
    assert chunk["choices"][0]["logprobs"] == {
        "tokens": ["A", "B"],
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [{"B": -0.1, "A": -0.5}, {"C": -0.2, "B": -3.0}],
        "text_offset": [0, 1],
    }


def test_of_two_alternatives_with_the_same_text_the_likelier_is_shown(render: Any) -> None:
    token = scored(0xE9, 0, -2.0, ((0xEA, -0.5), (0xE9, -2.0)))
    (chunk,) = events(render(RequestKind.COMPLETION, logprobs=2).chunk(0, Update("", (token,)), None, False))
    assert chunk["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5}]


@BOTH
def test_a_token_of_no_probability_has_a_number_that_json_can_hold(render: Any, kind: RequestKind) -> None:
    token = scored(65, 0, -math.inf, ((65, -math.inf),))
    raw = render(kind, logprobs=1).chunk(0, Update("A", (token,)), None, False)
    logprobs = events(raw)[0]["choices"][0]["logprobs"]
    if kind is RequestKind.COMPLETION:
        assert (logprobs["token_logprobs"], logprobs["top_logprobs"]) == ([-9999.0], [{"A": -9999.0}])
    else:
        assert logprobs["content"][0]["logprob"] == -9999.0
        assert logprobs["content"][0]["top_logprobs"][0]["logprob"] == -9999.0


def test_an_echo_stands_ahead_of_the_text_and_later_offsets_count_it(render: Any) -> None:
    renderer = render(RequestKind.COMPLETION, logprobs=0)
    echo = Echo("Hi", ((72, None), (105, TokenLogprob(105, -1.0))))
    (first,) = events(renderer.chunk(0, Update("A", (scored(65, 0),)), echo, True))
    (second,) = events(renderer.chunk(0, Update("B", (scored(66, 1),), "length"), None, False))
    assert first["choices"][0]["text"] == "HiA"
    assert first["choices"][0]["logprobs"] == {
        "tokens": ["H", "i", "A"],
        "token_logprobs": [None, -1.0, -0.5],
        "top_logprobs": [None, {"i": -1.0}, {"A": -0.5}],
        "text_offset": [0, 1, 2],
    }
    assert second["choices"][0]["logprobs"]["text_offset"] == [3]


def test_the_echo_of_one_choice_does_not_shift_another(render: Any) -> None:
    renderer = render(RequestKind.COMPLETION, logprobs=0)
    renderer.chunk(0, Update(""), Echo("long prompt"), True)
    renderer.chunk(1, Update(""), Echo("p"), True)
    for index, offset in ((0, 11), (1, 1)):
        (chunk,) = events(renderer.chunk(index, Update("A", (scored(65, 0),)), None, False))
        assert chunk["choices"][0]["logprobs"]["text_offset"] == [offset]


def test_offsets_of_an_echo_point_into_its_text_where_characters_span_tokens(render: Any) -> None:
    raw = "龘a".encode()
    echo = Echo("龘a", tuple((byte, TokenLogprob(byte, -1.0)) for byte in raw))
    renderer = render(RequestKind.COMPLETION, logprobs=0)
    (chunk,) = events(renderer.chunk(0, Update("B", (scored(66, 0),)), echo, True))
    assert chunk["choices"][0]["logprobs"]["text_offset"] == [0, 0, 0, 1, 2]


def test_offsets_of_an_echo_do_not_count_special_tokens_that_its_text_does_not_show(render: Any) -> None:
    echo = Echo("a", ((256, None), (97, TokenLogprob(97, -1.0))))
    renderer = render(RequestKind.COMPLETION, logprobs=0)
    (chunk,) = events(renderer.chunk(0, Update("B", (scored(66, 0),)), echo, True))
    assert chunk["choices"][0]["text"] == "aB"
    assert chunk["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1]


def test_offsets_of_an_echo_count_special_tokens_that_its_text_shows(render: Any) -> None:
    echo = Echo("<eos>a", ((256, None), (97, TokenLogprob(97, -1.0))))
    renderer = render(RequestKind.COMPLETION, logprobs=0)
    (chunk,) = events(renderer.chunk(0, Update("B", (scored(66, 0),)), echo, True))
    assert chunk["choices"][0]["logprobs"]["text_offset"] == [0, 5, 6]


def test_an_echo_in_a_body_stands_ahead_of_its_choice(render: Any) -> None:
    choices = [FinishedChoice(0, "B", (scored(66, 0),), "stop", Echo("A", ((65, None),)))]
    body = msgspec.json.decode(render(RequestKind.COMPLETION, logprobs=0).body(choices, USAGE))
    assert body["choices"][0]["text"] == "AB"
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 1]


def test_done_is_the_event_that_openais_clients_end_on() -> None:
    assert DONE == b"data: [DONE]\n\n"
