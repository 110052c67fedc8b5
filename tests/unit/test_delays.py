"""Deliberate delays: late once where they are asked for, and nothing at all where they are not."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app import delays
from serve_app.config import DelaysSection
from serve_app.delays import choice_type, slow_tokenizer, slow_writes
from serve_app.messages import EngineDelta, Sampling
from serve_app.postprocess.choice import Choice
from serve_app.vocabulary import Vocabulary


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each wait was, in seconds; nobody really waits."""
    waits: list[float] = []
    monkeypatch.setattr(delays, "time", SimpleNamespace(sleep=waits.append))

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(delays, "asyncio", SimpleNamespace(sleep=sleep))
    return waits


def test_without_delays_everything_is_what_it_was() -> None:
    tokenizer, app = object(), object()
    assert slow_tokenizer(tokenizer, DelaysSection(write_ms=5)) is tokenizer
    assert choice_type(DelaysSection(write_ms=5)) is Choice
    assert slow_writes(app, DelaysSection(encode_ms=5)) is app  # type: ignore[arg-type, comparison-overlap]


def test_a_slow_tokenizer_is_late_with_its_template_and_with_encoding_and_else_the_same(
    tokenizer: Any, slept: list[float]
) -> None:
    slow = slow_tokenizer(tokenizer, DelaysSection(template_ms=300, encode_ms=200))
    turns = [{"role": "user", "content": "hi"}]
    text = slow.apply_chat_template(turns, tokenize=False)
    assert text == tokenizer.apply_chat_template(turns, tokenize=False)
    assert slept == [0.3]
    (encoding,) = slow.backend_tokenizer.encode_batch([text])
    assert encoding.ids == tokenizer.backend_tokenizer.encode(text).ids
    assert slept == [0.3, 0.2]
    assert Vocabulary(slow).size == Vocabulary(tokenizer).size


def test_a_slow_choice_is_late_with_its_first_text_only(byte_vocabulary: Vocabulary, slept: list[float]) -> None:
    choice = choice_type(DelaysSection(detokenize_ms=300))(0, byte_vocabulary, (1,), (), Sampling())
    assert [choice.push(EngineDelta((97,))).text for _ in range(3)] == ["a"] * 3
    assert slept == [0.3]


def test_slow_writes_are_late_with_each_responses_first_bytes_only(slept: list[float]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for body in (b"", b"one", b"two"):
            await send({"type": "http.response.body", "body": body, "more_body": True})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append((message.get("body"), len(slept)))

    slow = slow_writes(app, DelaysSection(write_ms=300))
    for _ in range(2):
        asyncio.run(slow({}, None, send))  # type: ignore[arg-type]
    assert slept == [0.3, 0.3]
    assert sent[:4] == [(None, 0), (b"", 0), (b"one", 1), (b"two", 1)]
    assert time.sleep is not delays.time.sleep


@pytest.mark.parametrize(("delay", "waits"), [("template_ms", [0.3, 0.0]), ("encode_ms", [0.0, 0.3])])
def test_a_tokenizer_that_is_late_once_is_late_in_that_place_only(
    tokenizer: Any, slept: list[float], delay: str, waits: list[float]
) -> None:
    slow = slow_tokenizer(tokenizer, DelaysSection(**{delay: 300}))
    slow.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    slow.backend_tokenizer.encode_batch(["hi"])
    assert slept == waits


def test_a_slow_tokenizer_fails_as_the_tokenizer_does(tokenizer: Any, slept: list[float]) -> None:
    slow = slow_tokenizer(tokenizer, DelaysSection(template_ms=300))
    with pytest.raises(AttributeError):
        slow.no_such_method()
    assert slow.backend_tokenizer.token_to_id("<|im_end|>") == tokenizer.backend_tokenizer.token_to_id("<|im_end|>")
    assert slept == []


def test_each_slow_choice_is_late_on_its_own(byte_vocabulary: Vocabulary, slept: list[float]) -> None:
    slow = choice_type(DelaysSection(detokenize_ms=300))
    choices = [slow(index, byte_vocabulary, (1,), ("b",), Sampling()) for index in (0, 1)]
    for choice in choices:
        assert choice.push(EngineDelta((97, 98))) == Choice(0, byte_vocabulary, (1,), ("b",), Sampling()).push(
            EngineDelta((97, 98))
        )
        assert choice.stopped
    assert slept == [0.3, 0.3]


async def test_a_response_without_a_body_is_not_late_and_its_failure_is_its_own(slept: list[float]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})
        raise RuntimeError

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    with pytest.raises(RuntimeError):
        await slow_writes(app, DelaysSection(write_ms=300))({}, None, send)  # type: ignore[arg-type]
    assert (len(sent), slept) == (2, [])
