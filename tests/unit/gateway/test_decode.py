"""Bodies that are wrong in one place, and the name under which that place is refused."""

import tracemalloc

import pytest

from serve_app.errors import InvalidRequest, UnsupportedField
from serve_app.gateway.decode import Malformed, decode, diagnose
from serve_app.gateway.schema import ChatBody, CompletionBody

GOOD = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]%s}'


def chat(extra: bytes) -> bytes:
    return GOOD % (b", " + extra)


def refusal(raw: bytes) -> InvalidRequest:
    """As the gateway asks: a strict look, and for bytes that are no JSON a second one."""
    try:
        decode(raw, ChatBody)
    except Malformed:
        return diagnose(raw)
    except InvalidRequest as error:
        return error
    pytest.fail("not refused")


def test_a_good_body_is_decoded() -> None:
    body = decode(chat(b'"temperature": 1, "stop": "x", "n": null'), ChatBody)
    assert body.messages[0].content == "hi"
    assert (body.temperature, body.stop, body.n) == (1.0, "x", None)


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (chat(b'"max_tokens": "5"'), "max_tokens"),
        (chat(b'"max_tokens": 1.5'), "max_tokens"),
        (chat(b'"max_tokens": true'), "max_tokens"),
        (chat(b'"max_tokens": -1'), "max_tokens"),
        (chat(b'"max_tokens": 1e400'), "max_tokens"),
        (chat(b'"seed": 1' + b"0" * 30), "seed"),
        (chat(b'"temperature": NaN'), "temperature"),
        (chat(b'"temperature": -Infinity'), "temperature"),
        (chat(b'"temperature": 2.1'), "temperature"),
        (chat(b'"logit_bias": {"5": 101}'), "logit_bias"),
        (chat(b'"logit_bias": {"five": 1}'), "logit_bias"),
        (chat(b'"stop": ["a", 1]'), "stop[1]"),
        (chat(b'"stop": ""'), "stop"),
        (chat(b'"user": "\\ud800"'), "user"),
        (chat(b'"user": "\xff"'), "user"),
        (chat(b'"stream_options": {"include_usage": 1}'), "stream_options.include_usage"),
        (b'{"model": "m"}', "messages"),
        (b'{"model": "m", "messages": []}', "messages"),
        (b'{"model": "m", "messages": [{"role": "user", "content": [{"type": 1}]}]}', "messages[0].content[0].type"),
        (b'{"model": "m", "messages": [{"content": "hi"}]}', "messages[0].role"),
        (b"", "body"),
        (b"  ", "body"),
        (b"null", "body"),
        (b"[1]", "body"),
        (b'{"model": "m"', "body"),
        (GOOD % b"" + b" x", "body"),
        (b"[" * 100_000, "body"),
        (chat(b'"tools": ' + b"[" * 100_000 + b"]" * 100_000), "body"),
        (chat(b'"seed": ' + b"1" * 5000), "seed"),
        (b"\xef\xbb\xbf{}", "body"),
        ("{}".encode("utf-16"), "body"),
    ],
)
def test_what_is_wrong_is_named(raw: bytes, param: str) -> None:
    error = refusal(raw)
    assert error.param == param
    assert error.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (chat(b'"frobnicate": 1'), "frobnicate"),
        (chat(b'"stream_options": {"x": 1}'), "stream_options.x"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "hi", "extra": 1}]}', "messages[0].extra"),
    ],
)
def test_an_unknown_field_is_refused_by_its_path(raw: bytes, param: str) -> None:
    with pytest.raises(UnsupportedField) as raised:
        decode(raw, ChatBody)
    assert raised.value.param == param


def test_a_field_of_the_other_route_is_unknown() -> None:
    with pytest.raises(UnsupportedField, match="messages"):
        decode(b'{"model": "m", "prompt": "x", "messages": []}', CompletionBody)


def test_a_hostile_field_name_is_cut_and_does_not_break_the_message() -> None:
    with pytest.raises(UnsupportedField) as raised:
        decode(chat(b'"' + b"x" * 10_000 + b'": 1'), ChatBody)
    assert len(raised.value.message) < 500


def test_a_misspelt_field_gets_a_suggestion() -> None:
    assert "did you mean temperature?" in refusal(chat(b'"temprature": 1')).message


def test_what_spoils_a_body_is_found_deep_down_and_named_by_its_path() -> None:
    assert refusal(chat(b'"metadata": {"a": [1, {"b": [0, NaN]}]}')).param == "metadata.a[1].b[1]"
    assert refusal(chat(b'"metadata": [{"a": 1}, [], {"\\ud800": 1}]')).param == "metadata[2].?"


def test_a_long_path_is_cut_and_costs_no_memory_per_value() -> None:
    tracemalloc.start()
    error = refusal(chat(b'"metadata": {"' + b"k" * 20_000 + b'": [' + b"0," * 20_000 + b"NaN]}"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert error.param is not None
    assert len(error.param) <= 200
    assert peak < 5_000_000
