"""The load: so many clients, each with one streaming chat after the other on a connection it keeps.

Run as a process of its own (`python -m bench.client LOAD`), so that its CPU is nobody's; LOAD is a JSON `Load`, the
answer on standard output a JSON `Seen`. The same for every system: httptools and a typed decoder, a few microseconds
per event; and ahead of every system where it is allowed to be, so that it sees what comes when it comes. Without that
it waited up to half a second for a core on a full machine, and held up what it measures.
"""

import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec

# Common English words, one token each or nearly: prompts of one length, no two alike.
_COMMON = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work number night point home water room mother area money story fact
month lot right study book eye job word business issue side kind head house service friend father power
"""
WORDS = _COMMON.split()
_RETRY_S = 0.1
_LOOK_S = 0.01


class Load(msgspec.Struct, frozen=True):
    """What to do. Times are of `time.monotonic()`, in seconds, which all processes of a machine share.

    The `clients` begin one after the other between `begin_s` and `full_s`, and ask until `end_s`; what was asked by
    then is let finish. Each request has `prompt_words` words and asks for `tokens` tokens; one in `traced_every` asks
    to be traced, 0 none. A request without an end after `timeout_s` has failed.
    """

    url: str
    model: str
    clients: int
    begin_s: float
    full_s: float
    end_s: float
    prompt_words: int = 60
    tokens: int = 64
    traced_every: int = 0
    timeout_s: float = 60.0
    seed: int = 0


class Answer(msgspec.Struct, frozen=True):
    """One request: when it was sent, when each event with text came and when it ended, in seconds; what went wrong."""

    sent_s: float
    event_s: list[float]
    end_s: float
    tokens: int
    error: str | None = None


class Seen(msgspec.Struct, frozen=True):
    """All answers. late_ms: by how much the client came late to look at them, at worst."""

    answers: list[Answer]
    late_ms: float


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass
class Stream:
    """The events of one response while it comes; `tokens` is what its usage says."""

    clock: Callable[[], float] = time.monotonic
    event_s: list[float] = field(default_factory=list)
    tokens: int = 0
    done: bool = False
    error: str | None = None
    _rest: bytes = b""

    def take(self, body: bytes) -> None:
        """Bytes as they come, cut anywhere. Raises msgspec.MsgspecError for an event that is no chat chunk."""
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                self.done = True
            elif event.startswith(b"data: "):
                self._take_chunk(_decode(event[6:]))

    def problem(self, status: int, tokens: int) -> str | None:
        """What is wrong with the whole response, if anything is."""
        if status != 200:
            return f"status {status}"
        if self.error is not None:
            return self.error
        if not self.done:
            return "no [DONE]"
        return None if self.tokens == tokens else f"{self.tokens} tokens in place of {tokens}"

    def _take_chunk(self, chunk: _Chunk) -> None:
        if chunk.error is not None:
            self.error = f"error event: {chunk.error}"[:200]
        if chunk.usage is not None:
            self.tokens = chunk.usage.completion_tokens
        # A role alone is no token; text that is still incomplete is none that a client sees.
        if chunk.choices and chunk.choices[0].delta.content:
            self.event_s.append(self.clock())


class _Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self) -> None:
        self._stream = Stream()
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    async def ask(self, request: bytes, tokens: int, timeout_s: float) -> Answer:
        self._stream = Stream()
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        sent_s = time.monotonic()
        self.transport.write(request)
        try:
            await asyncio.wait_for(self._ended, timeout_s)
            problem = self._stream.problem(self._parser.get_status_code(), tokens)
        except TimeoutError:
            problem = f"no end after {timeout_s:.0f} s"
        except (OSError, msgspec.MsgspecError, httptools.HttpParserError) as error:
            problem = repr(error)
        return Answer(sent_s, self._stream.event_s, time.monotonic(), self._stream.tokens, problem)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.MsgspecError) as error:
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or ConnectionResetError("the server closed the connection"))

    def _end(self, error: Exception | None = None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        if self._parser.get_status_code() == 200:
            self._stream.take(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._end()


async def run(load: Load) -> Seen:
    """Clients begin evenly spread, so that they do not go in step."""
    late_s = 0.0

    async def look() -> None:
        nonlocal late_s
        while True:
            due_s = time.monotonic() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            late_s = max(late_s, time.monotonic() - due_s)

    looking = asyncio.create_task(look())
    by_client = await asyncio.gather(*(_client(load, number) for number in range(load.clients)))
    looking.cancel()
    return Seen([one for answers in by_client for one in answers], late_s * 1000)


async def _client(load: Load, number: int) -> list[Answer]:
    host, port = load.url.removeprefix("http://").split(":")
    numbers = random.Random(f"{load.seed} {number}")
    begin_s = load.begin_s + (load.full_s - load.begin_s) * number / load.clients
    await asyncio.sleep(max(0.0, begin_s - time.monotonic()))
    answers: list[Answer] = []
    connection: _Connection | None = None
    while (now := time.monotonic()) < load.end_s:
        try:
            if connection is None:
                _, connection = await asyncio.get_running_loop().create_connection(_Connection, host, int(port))
            answers.append(await connection.ask(request(load, numbers), load.tokens, load.timeout_s))
        except OSError as error:
            answers.append(Answer(now, [], time.monotonic(), 0, repr(error)))
        if answers[-1].error:
            if connection is not None:
                connection.transport.abort()
            connection = None
            await asyncio.sleep(_RETRY_S)
    if connection is not None:
        connection.transport.abort()
    return answers


def request(load: Load, numbers: random.Random) -> bytes:
    """The bytes of one request."""
    body = msgspec.json.encode(
        {
            "model": load.model,
            "messages": [{"role": "user", "content": " ".join(numbers.choices(WORDS, k=load.prompt_words))}],
            "max_tokens": load.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    traced = int(load.traced_every > 0 and numbers.randrange(load.traced_every) == 0)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {load.url.removeprefix('http://')}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"traceparent: 00-{numbers.randbytes(16).hex()}-{numbers.randbytes(8).hex()}-{traced:02}\r\n\r\n"
    )
    return head.encode() + body


def _ahead_of_all() -> None:
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


if __name__ == "__main__":
    _ahead_of_all()
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(run(msgspec.json.decode(sys.argv[1], type=Load)))))
