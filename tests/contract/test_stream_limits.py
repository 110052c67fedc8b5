"""Streams whose tokens are sent together, and clients that do not read theirs."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from raw_http import post

MODEL = "simulated"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40}
TOKENS = 40
GROUP = 8


@pytest.fixture
def grouping(serve: Any) -> Any:
    return serve({"postprocess": {"stream_coalesce_tokens": GROUP}})


@pytest.fixture
def grouped(grouping: Any) -> Iterator[openai.OpenAI]:
    with grouping.client() as client:
        yield client


def parts_of(chunks: list[Any], index: int) -> list[Any]:
    return [choice for chunk in chunks for choice in chunk.choices if choice.index == index]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2}], ids=["plain", "logprobs"])
def test_a_grouped_chat_says_the_same_in_fewer_chunks(
    client: openai.OpenAI, grouped: openai.OpenAI, fields: dict[str, Any], n: int
) -> None:
    asked: dict[str, Any] = CHAT | fields | {"n": n, "stream": True, "stream_options": {"include_usage": True}}
    alone, together = (list(one.chat.completions.create(**asked)) for one in (client, grouped))
    for index in range(n):
        before, after = parts_of(alone, index), parts_of(together, index)
        assert "".join(one.delta.content or "" for one in after) == "".join(one.delta.content or "" for one in before)
        assert scores_of(after) == scores_of(before)
        assert [one.finish_reason for one in after if one.finish_reason] == ["length"]
        # The role, the first token, five groups of what is left; and one more where the last token ends no group.
        assert len(after) <= 2 + -(-(TOKENS - 1) // GROUP) < len(before)
    assert together[-1].usage == alone[-1].usage


def scores_of(choices: list[Any]) -> list[Any]:
    return [token for one in choices if one.logprobs for token in one.logprobs.content]


def test_a_grouped_completion_has_its_echo_first_and_its_offsets_right(
    client: openai.OpenAI, grouped: openai.OpenAI
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": TOKENS, "echo": True, "logprobs": 2}
    whole = client.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in grouped.completions.create(**asked, stream=True)]
    assert chunks[0].text.startswith("Once")
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert whole.logprobs is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        rows = [row for chunk in chunks if chunk.logprobs for row in getattr(chunk.logprobs, name)]
        assert rows == getattr(whole.logprobs, name), name


def test_a_stop_string_ends_a_grouped_stream_where_it_ends_any(grouping: Any, grouped: openai.OpenAI) -> None:
    free = grouped.completions.create(model=MODEL, prompt="Once", max_tokens=TOKENS).choices[0].text
    stop = free[30:38]
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 4000, "stop": stop}
    chunks = [chunk.choices[0] for chunk in grouped.completions.create(**asked, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == free[: free.index(stop)]
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
    load = grouping.wait_idle()
    assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)


def test_a_grouped_stream_that_fails_has_sent_all_that_was_made(serve: Any) -> None:
    service = serve({"engine": {"sim": {"fail_after_tokens": 20}}, "postprocess": {"stream_coalesce_tokens": 1024}})
    with serve({}).client() as client:
        asked: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 20}
        expected = client.completions.create(**asked).choices[0].text
    got = ""
    with service.client() as client:
        stream = client.completions.create(**asked | {"max_tokens": 40}, stream=True)
        with pytest.raises(openai.APIError, match="failed"):  # noqa: PT012 - what comes ahead of it is what counts
            for chunk in stream:
                got += chunk.choices[0].text
    assert expected.startswith(got.rstrip("\ufffd"))
    assert len(got) >= len(expected) - 3  # part of a character may be left


@pytest.mark.parametrize("n", [1, 8])
def test_a_client_that_does_not_read_costs_the_engine_no_more_than_the_backlog(serve: Any, n: int) -> None:
    """It ends long before the deadline, and a client that reads at last is told why."""
    service = serve({"channel": {"max_backlog_items": 16}})
    body = CHAT | {"max_tokens": 8000, "n": n, "stream": True, "logprobs": True, "top_logprobs": 20}
    raw = json.dumps(body).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", service.port))
        connection.sendall(post("/v1/chat/completions", raw, f"unread-{n}"))
        service.wait_busy()
        load = service.wait_idle()
        assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)
        received = b""
        while b"event: error" not in received or not received.endswith(b"0\r\n\r\n"):
            assert (piece := connection.recv(1 << 20)), "the stream broke off"
            received = (received + piece)[-8192:]
    assert b'"code":"backlog_full"' in received
    assert b'"param":"channel.max_backlog_items"' in received
    assert b"[DONE]" not in received
    request = remembered(service, f"unread-{n}")
    assert (request.outcome, request.error, request.status) == ("error", "backlog_full", 503)


def test_a_client_that_reads_gets_all_of_a_fast_answer_within_a_small_backlog(serve: Any) -> None:
    service = serve({"channel": {"max_backlog_items": 16}})
    with service.client() as client:
        chunks = list(client.chat.completions.create(**CHAT | {"max_tokens": 500, "n": 4}, stream=True))
    assert [len([one for one in parts_of(chunks, index) if one.finish_reason]) for index in range(4)] == [1] * 4


def remembered(service: Any, request_id: str) -> Any:
    """The one record of it. A request is over some turns of the event loop after its client has the last byte."""
    found: Any = ()
    while not found:  # until pytest's own limit
        found = service.requests(id=request_id)
    (request,) = found
    return request
