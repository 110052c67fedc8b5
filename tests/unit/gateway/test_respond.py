"""The response's life: errors before and after the first byte, and clients that leave or do not read."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from serve_app.errors import DeadlineExceeded, InvalidRequest, Overloaded
from serve_app.gateway import respond
from serve_app.gateway.recording import Recording
from serve_app.gateway.respond import GeneratedResponse, error_response
from serve_app.messages import RequestContext

CONTEXT = RequestContext("the-id", time.time() + 60)


class Client:
    """Collects what is sent; leaves when told, and blocks in `send` if it does not read."""

    def __init__(self, reads: bool = True) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.got_body = asyncio.Event()
        self._reads = reads

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.got_body.set()
        if not self._reads and message["type"] == "http.response.body":
            await asyncio.Event().wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class Stream:
    """Chunks, then an error, a wait without end, or the end; knows whether it was closed."""

    def __init__(self, chunks: list[bytes], error: Exception | None = None, hang: bool = False) -> None:
        self._chunks, self._error, self._hang = chunks, error, hang
        self.closed = False

    async def run(self) -> AsyncGenerator[bytes, None]:
        try:
            for chunk in self._chunks:
                yield chunk
            if self._error is not None:
                raise self._error
            if self._hang:
                await asyncio.Event().wait()
        finally:
            self.closed = True


async def respond_to(client: Client, stream: Stream, sse: bool, context: RequestContext = CONTEXT) -> None:
    recording = Recording(context.request_id, "chat", "m", time.time())
    await GeneratedResponse(stream.run(), sse, context, recording)({"type": "http"}, client.receive, client.send)


async def test_a_stream_is_sent_as_it_is_and_ended() -> None:
    client = Client()
    await respond_to(client, Stream([b"data: 1\n\n", b"data: [DONE]\n\n"]), sse=True)
    assert client.sent[0]["status"] == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in client.sent[0]["headers"]
    assert client.body == b"data: 1\n\ndata: [DONE]\n\n"
    assert client.sent[-1]["more_body"] is False


async def test_a_json_body_has_its_length() -> None:
    client = Client()
    await respond_to(client, Stream([b"{}"]), sse=False)
    assert (b"content-length", b"2") in client.sent[0]["headers"]
    assert client.body == b"{}"
    assert client.sent[-1]["more_body"] is False


async def test_an_error_before_the_first_byte_has_its_status() -> None:
    client = Client()
    await respond_to(client, Stream([], InvalidRequest("n: too many.", "n")), sse=True)
    assert client.sent[0]["status"] == 400
    assert b'"param":"n"' in client.body


async def test_an_error_after_the_first_byte_is_one_event_and_the_end() -> None:
    client = Client()
    await respond_to(client, Stream([b"data: 1\n\n"], DeadlineExceeded("late")), sse=True)
    assert client.sent[0]["status"] == 200
    first, event = client.body.split(b"event: error\n")
    assert first == b"data: 1\n\n"
    assert event.startswith(b'data: {"error":{"message":"late"')
    assert b"[DONE]" not in client.body
    assert client.sent[-1]["more_body"] is False


async def test_an_error_from_outside_the_tree_tells_the_client_its_id_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = Client()
    await respond_to(client, Stream([], KeyError("secret")), sse=False)
    assert client.sent[0]["status"] == 500
    assert b"the-id" in client.body
    assert b"secret" not in client.body
    assert "the-id" in caplog.text


async def test_a_client_that_leaves_closes_the_stream_at_once() -> None:
    client, stream = Client(), Stream([b"data: 1\n\n"], hang=True)
    response = asyncio.create_task(respond_to(client, stream, sse=True))
    await asyncio.wait_for(client.got_body.wait(), 5)
    assert not stream.closed
    client.gone.set()
    await asyncio.wait_for(response, 5)
    assert stream.closed


async def test_a_response_that_is_cancelled_closes_the_stream() -> None:
    client, stream = Client(), Stream([b"data: 1\n\n"], hang=True)
    response = asyncio.create_task(respond_to(client, stream, sse=True))
    await asyncio.wait_for(client.got_body.wait(), 5)
    response.cancel()
    await asyncio.wait((response,), timeout=5)
    assert stream.closed


async def test_a_client_that_does_not_read_is_left_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(respond, "_LAST_WORD_S", 0.0)
    client, stream = Client(reads=False), Stream([b"data: 1\n\n"] * 1000)
    past = RequestContext("id", time.time() + 0.05)
    await asyncio.wait_for(respond_to(client, stream, sse=True, context=past), 5)
    assert stream.closed


async def test_a_stream_that_gives_nothing_and_keeps_no_deadline_is_answered_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(respond, "_LAST_WORD_S", 0.0)
    client, stream = Client(), Stream([], hang=True)
    await asyncio.wait_for(respond_to(client, stream, sse=False, context=RequestContext("id", time.time() + 0.05)), 5)
    assert client.sent[0]["status"] == 504
    assert stream.closed


def test_a_refusal_says_when_to_come_back_in_whole_seconds() -> None:
    assert error_response(Overloaded("full", retry_after_s=0.2)).headers["retry-after"] == "1"
    assert error_response(Overloaded("full", retry_after_s=2.1)).headers["retry-after"] == "3"
    assert "retry-after" not in error_response(Overloaded("full")).headers
