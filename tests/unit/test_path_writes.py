"""What of an answer goes to its client in one write, and what becomes of a client who reads slowly or not at all."""

import asyncio
import dataclasses
import json
import time
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from serve_app.aio import Sink
from serve_app.config import GatewaySection
from serve_app.errors import BacklogFull, DeadlineExceeded, EngineDied
from serve_app.gateway.inbound import Inbound, from_completion
from serve_app.gateway.recording import Recording
from serve_app.gateway.schema import CompletionBody
from serve_app.messages import (
    Closing,
    Detokenized,
    GenerateRequest,
    GenerateSummary,
    PathReport,
    RequestContext,
    TokenIds,
    Tokenized,
    TokenizeRequest,
)
from serve_app.path import Hops, answer

SUMMARY = GenerateSummary((), (), 1, 2, 0)
LAST = b'data: {"choices":[]}\n\ndata: [DONE]\n\n'
BODY = b'{"choices":[1]}'
READ_S = 10.0


class Tokenizer:
    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        return Tokenized(((1,),), (16,), 100, 50)

    async def detokenize(self, context: RequestContext, ids: TokenIds) -> Detokenized:
        raise NotImplementedError


class Postprocess:
    """Plays a script: bytes and closings are pushed, a number is a pause in seconds, an exception is raised."""

    def __init__(self, *script: Any) -> None:
        self._script = script
        self.pushed = 0
        self.ended = False

    async def generate(self, request: GenerateRequest, sink: Sink[bytes | Closing]) -> None:
        try:
            for step in self._script:
                if isinstance(step, int | float):
                    await asyncio.sleep(step)
                elif isinstance(step, Exception):
                    raise step
                else:
                    sink(step)
                    self.pushed += 1
        finally:
            self.ended = True

    async def report(self) -> PathReport:
        raise NotImplementedError


class Client:
    """Takes so long to read each write; keeps the writes."""

    def __init__(self, timings: bool = False, stream: bool = True, read_s: float = 0.0, limit: int = 1000) -> None:
        body = msgspec.convert({"model": "m", "prompt": "hi", "stream": stream}, CompletionBody)
        inbound: Inbound = from_completion(body, GatewaySection())
        self._inbound = dataclasses.replace(inbound, include_timings=timings)
        self._read_s = read_s
        self._limit = limit
        self.writes: list[bytes] = []
        self.recording = Recording("id", "chat", "m", time.time())
        self.recording.inbound = self._inbound
        self.recording.status = 200

    async def read(self, postprocess: Postprocess, remaining_s: float = 3600.0) -> None:
        hops = Hops(Tokenizer(), postprocess, self._limit)
        context = RequestContext("id", time.time() + remaining_s)
        async with aclosing(answer(self._inbound, context, hops, self.recording)) as stream:
            async for data in stream:
                begin_s = time.time()
                self.writes.append(data)
                await asyncio.sleep(self._read_s)
                self.recording.wrote(begin_s, time.time())


@pytest.mark.parametrize("timings", [False, True])
def test_items_that_come_together_are_one_write(run_virtual: Any, timings: bool) -> None:
    client, postprocess = (
        Client(timings),
        Postprocess(b"a", b"b", b"c", 1, b"d", 1, b"e", b"f", 1, Closing(LAST, SUMMARY)),
    )
    run_virtual(client.read(postprocess))
    assert client.writes[:3] == [b"abc", b"d", b"ef"]
    assert len(client.writes) == 4
    assert client.recording.whole


def test_what_comes_while_the_client_reads_is_its_next_write(run_virtual: Any) -> None:
    client = Client(read_s=READ_S)
    run_virtual(client.read(Postprocess(b"a", 1, b"b", 1, b"c", 20, b"d", 1, Closing(LAST, SUMMARY))))
    assert client.writes == [b"a", b"bc", b"d", LAST]


@pytest.mark.parametrize("read_s", [0.0, READ_S])
def test_the_end_goes_with_the_last_chunk_in_one_write(run_virtual: Any, read_s: float) -> None:
    client = Client(read_s=read_s)
    run_virtual(client.read(Postprocess(b"a", 1, b"b", b"c", Closing(LAST, SUMMARY))))
    assert client.writes == [b"a", b"bc" + LAST]
    assert client.recording.whole
    assert client.recording.metrics().completion_tokens == 2


def test_a_stream_that_is_all_there_at_once_is_one_write(run_virtual: Any) -> None:
    client = Client()
    run_virtual(client.read(Postprocess(b"a", b"b", Closing(LAST, SUMMARY))))
    assert client.writes == [b"ab" + LAST]


@pytest.mark.parametrize("read_s", [0.0, READ_S])
def test_with_timings_the_last_chunk_is_written_before_the_end_that_says_when(run_virtual: Any, read_s: float) -> None:
    client = Client(timings=True, read_s=read_s)
    run_virtual(client.read(Postprocess(b"a", b"b", Closing(LAST, SUMMARY))))
    first, last = client.writes
    assert first == b"ab"
    event, done, end = last.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    timings = json.loads(event.removeprefix(b"data: "))["timings"]
    assert timings["completion_tokens"] == 2
    assert timings["ttft_ms"] is not None
    assert "gateway.write" in [stage["name"] for stage in timings["stages"]]


def test_timings_that_come_alone_are_one_write(run_virtual: Any) -> None:
    client = Client(timings=True)
    run_virtual(client.read(Postprocess(b"a", 1, Closing(LAST, SUMMARY))))
    assert client.writes[0] == b"a"
    assert len(client.writes) == 2
    assert client.writes[1].startswith(b'data: {"choices":[],"timings":{')


@pytest.mark.parametrize("timings", [False, True])
def test_a_json_body_is_one_write(run_virtual: Any, timings: bool) -> None:
    client = Client(timings, stream=False)
    run_virtual(client.read(Postprocess(1, Closing(BODY, SUMMARY))))
    (body,) = client.writes
    assert json.loads(body)["choices"] == [1]
    assert ("timings" in json.loads(body)) == timings
    assert client.recording.whole


@pytest.mark.parametrize("timings", [False, True])
@pytest.mark.parametrize("pause", [(), (1,)])
def test_what_came_ahead_of_an_error_is_written_and_what_was_measured_is_kept(
    run_virtual: Any, pause: tuple[int, ...], timings: bool
) -> None:
    client = Client(timings)
    with pytest.raises(EngineDied):
        run_virtual(client.read(Postprocess(b"a", b"b", *pause, Closing(b"", SUMMARY), EngineDied("dead"))))
    assert client.writes == [b"ab"]
    assert client.recording.metrics().completion_tokens == 2
    assert not client.recording.whole


def test_an_error_before_any_byte_is_written_writes_nothing(run_virtual: Any) -> None:
    client = Client()
    with pytest.raises(EngineDied):
        run_virtual(client.read(Postprocess(1, Closing(b"", SUMMARY), EngineDied("dead"))))
    assert client.writes == []


def test_an_error_after_the_end_leaves_the_answer_whole(run_virtual: Any) -> None:
    client = Client()
    with pytest.raises(EngineDied):
        run_virtual(client.read(Postprocess(b"a", Closing(LAST, SUMMARY), EngineDied("too late"))))
    assert client.writes == [b"a" + LAST]
    assert client.recording.whole


def test_a_client_that_reads_too_slowly_gets_what_has_come_and_then_why_it_ended(run_virtual: Any) -> None:
    client, postprocess = Client(read_s=3000.0, limit=20), Postprocess(*[b"x", 1] * 1000)
    with pytest.raises(BacklogFull) as raised:
        run_virtual(client.read(postprocess))
    assert raised.value.param == "channel.max_backlog_items"
    assert client.writes == [b"x", b"x" * 20]
    assert postprocess.pushed == 21
    assert postprocess.ended
    assert not client.recording.whole


def test_a_client_that_is_slow_but_within_the_limit_gets_everything(run_virtual: Any) -> None:
    client = Client(read_s=READ_S, limit=10)
    run_virtual(client.read(Postprocess(*[b"x", 1] * 1000, Closing(LAST, SUMMARY))))
    assert b"".join(client.writes) == b"x" * 1000 + LAST
    assert len(client.writes) <= 102


def test_a_deadline_that_passes_while_the_client_reads_ends_the_work_then(run_virtual: Any) -> None:
    async def main() -> None:
        client, postprocess = Client(read_s=60.0), Postprocess(b"a", 1, b"b", 3600, b"never")
        reading = asyncio.create_task(client.read(postprocess, remaining_s=30.0))
        await asyncio.sleep(29)
        assert not postprocess.ended
        await asyncio.sleep(3)
        assert postprocess.ended
        with pytest.raises(DeadlineExceeded):
            await reading
        assert client.writes == [b"a", b"b"]

    run_virtual(main())


def test_a_client_that_leaves_while_it_is_written_to_ends_the_work_before_the_answer_is_closed(
    run_virtual: Any,
) -> None:
    async def main() -> None:
        client, postprocess = Client(read_s=60.0), Postprocess(b"a", 3600, b"never")
        reading = asyncio.create_task(client.read(postprocess))
        await asyncio.sleep(1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert postprocess.ended
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())
