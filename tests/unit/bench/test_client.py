"""What the benchmarks' client takes from a response, however it is cut, and what it sends."""

import random

import msgspec
import pytest
from bench.client import Load, Stream, request

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TEXT = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
LOAD = Load("http://127.0.0.1:1", "m", clients=1, begin_s=0, full_s=0, end_s=1)


def streamed(*parts: bytes) -> Stream:
    clock = iter(range(100))
    stream = Stream(clock=lambda: float(next(clock)))
    for part in parts:
        stream.take(part)
    return stream


def test_events_with_text_are_stamped_and_the_usage_is_kept() -> None:
    stream = streamed(ROLE, TEXT, TEXT, USAGE, DONE)
    assert stream.event_s == [0.0, 1.0]
    assert stream.problem(200, tokens=2) is None


def test_events_may_be_cut_anywhere() -> None:
    whole = ROLE + TEXT + TEXT + USAGE + DONE
    for size in (1, 7, 50):
        stream = streamed(*(whole[at : at + size] for at in range(0, len(whole), size)))
        assert (len(stream.event_s), stream.tokens, stream.done) == (2, 2, True)


@pytest.mark.parametrize(
    ("parts", "status", "problem"),
    [
        ([TEXT, USAGE, DONE], 503, "status 503"),
        ([TEXT, USAGE], 200, "no [DONE]"),
        ([TEXT, DONE], 200, "0 tokens in place of 2"),
        ([TEXT, b'data: {"error":{"code":"engine_died"}}\n\n'], 200, "error event: {'code': 'engine_died'}"),
    ],
)
def test_a_response_that_is_not_whole_is_a_failure(parts: list[bytes], status: int, problem: str) -> None:
    assert streamed(*parts).problem(status, tokens=2) == problem


def test_an_event_that_is_no_json_is_an_error() -> None:
    with pytest.raises(msgspec.DecodeError):
        streamed(b"data: {oops\n\n")


def test_prompts_have_one_length_and_differ() -> None:
    numbers = random.Random(0)
    bodies = [msgspec.json.decode(request(LOAD, numbers).partition(b"\r\n\r\n")[2]) for _ in range(20)]
    prompts = [body["messages"][0]["content"] for body in bodies]
    assert {len(prompt.split()) for prompt in prompts} == {60}
    assert len(set(prompts)) == 20


@pytest.mark.parametrize(("traced_every", "traced"), [(0, 0), (1, 50)])
def test_a_request_says_whether_it_is_traced(traced_every: int, traced: int) -> None:
    numbers = random.Random(0)
    load = msgspec.structs.replace(LOAD, traced_every=traced_every)
    assert sum(b"-01\r\n" in request(load, numbers) for _ in range(50)) == traced
