"""What happens to streams when a wire is cut, a process is killed, frames are lost, or a stranger connects."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from wire import Ends, Wire, ends, entries, of, settled

from serve_app.aio import Sink
from serve_app.channel import reader as reading
from serve_app.channel import writer as writing
from serve_app.channel.frame import Codec, greeting
from serve_app.channel.reader import Reader
from serve_app.channel.route import Route
from serve_app.channel.writer import Writer
from serve_app.errors import ChannelLost


class Endless:
    """Work that says one thing and goes on until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def work(self, sink: Sink[bytes]) -> None:
        sink(b"a")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def test_a_cut_ends_every_stream_of_the_pair_on_both_sides_and_no_other() -> None:
    async with ends() as both:
        endless, got = Endless(), list[bytes]()
        cut = [asyncio.create_task(both.ask(endless.work, got.append)) for _ in range(20)]
        await settled(lambda: len(got) == 20)
        own, both.writer = both.writer, Writer(Codec(bytes), 100)
        own_wire, both.wire = both.wire, Wire(own_wire_port(both))
        await both.wire.start()
        arrived = asyncio.Event()
        other_done = asyncio.Event()

        async def other(sink: Sink[bytes]) -> None:
            sink(b"still")
            await other_done.wait()
            sink(b"here")

        kept: list[bytes] = []
        staying = asyncio.create_task(both.ask(other, lambda item: (kept.append(item), arrived.set())[0]))
        await arrived.wait()
        await own_wire.cut()
        results = await asyncio.gather(*cut, return_exceptions=True)
        assert {type(result) for result in results} == {ChannelLost}
        assert endless.cancelled == 20
        other_done.set()
        await staying
        assert kept == [b"still", b"here"]
        await both.writer.stop()
        await own_wire.stop()
        await own.stop()


def own_wire_port(both: Ends) -> int:
    return both.reader._address[1]


async def test_after_a_cut_the_next_request_connects_anew() -> None:
    async with ends() as both:
        for _ in range(3):
            got: list[bytes] = []
            await both.ask(of(b"a", b"b"), got.append)
            assert got == [b"a", b"b"]
            await both.wire.cut()
            await settled(lambda: both.writer.links == 0 and both.reader.links == 0)
        assert both.wire.connections == 3


def drop_second(frames: list[bytes]) -> list[bytes]:
    return frames[:1] + frames[2:]


def repeat_second(frames: list[bytes]) -> list[bytes]:
    return [frames[0], frames[1], *frames[1:]]


def swap(frames: list[bytes]) -> list[bytes]:
    return [frames[1], frames[0], *frames[2:]]


@pytest.mark.parametrize("fault", [drop_second, repeat_second, swap])
async def test_items_that_are_lost_repeated_or_out_of_order_end_the_stream(
    fault: Callable[[list[bytes]], list[bytes]],
) -> None:
    async with ends() as both:
        held: list[bytes] = []

        def tamper(body: bytes) -> list[bytes]:
            held.append(body)
            return fault(held) if len(held) == 3 else []

        both.wire.tamper = tamper

        async def work(sink: Sink[bytes]) -> None:
            for number, item in enumerate((b"a", b"b", b"c"), start=1):
                sink(item)
                await settled(lambda number=number: len(held) >= number)
            await asyncio.Event().wait()

        got: list[bytes] = []
        with pytest.raises(ChannelLost, match="came after"):
            await both.ask(work, got.append)
        assert got in ([b"a"], [b"a", b"b"], [])


async def test_two_replicas_that_answer_one_request_end_it() -> None:
    async with ends() as both:
        second: Writer[bytes] = Writer(Codec(bytes), 100)
        got: list[bytes] = []
        with both.reader.open(got.append) as subscription:
            route = subscription.route

            async def twice() -> None:
                with both.writer.open(route) as sender:
                    sender.send(b"first")
                    await settled(lambda: bool(got))
                    with second.open(route) as impostor:
                        impostor.send(b"again")
                        await asyncio.Event().wait()

            with pytest.raises(ChannelLost, match="Two replicas"):
                await subscription.finish(twice(), lambda error: True)
        assert got == [b"first"]
        await second.stop()


async def test_a_reader_that_is_not_there_is_lost_and_the_work_is_cancelled() -> None:
    async with ends() as both:
        await both.wire.stop()
        endless = Endless()
        with pytest.raises(ChannelLost):
            await both.ask(endless.work, lambda _: None)
        assert endless.cancelled == 1
        assert both.writer.links == 0


async def test_a_reader_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_CONNECT_S", 0.05)

    async def hang(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    writer: Writer[bytes] = Writer(Codec(bytes), 100)
    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", hang)
    endless = Endless()
    with pytest.raises(ChannelLost), writer.open(Route("192.0.2.1", 1, b"k" * 16, 1)) as sender:
        await endless.work(sender.send)
    assert writer.links == 0


async def test_a_reader_that_stops_ends_its_streams() -> None:
    async with ends() as both:
        endless, got = Endless(), list[bytes]()
        asking = asyncio.create_task(both.ask(endless.work, got.append))
        await settled(lambda: bool(got))
        both.reader.stop()
        with pytest.raises(ChannelLost):
            await asking
        await settled(lambda: endless.cancelled == 1)


CHILD = """
import asyncio, sys
from serve_app.channel.frame import Codec
from serve_app.channel.reader import Reader
from serve_app.channel.route import Route
from serve_app.channel.writer import Writer

async def write(host, port, key):
    writer = Writer(Codec(bytes), 100)
    async def one(number):
        with writer.open(Route(host, int(port), bytes.fromhex(key), number)) as sender:
            sender.send(b"from the child")
            await asyncio.Event().wait()
    await asyncio.gather(*(one(number) for number in range(1, 11)))

async def read():
    reader = Reader(Codec(bytes))
    await reader.listen("127.0.0.1")
    for _ in range(10):
        subscription = reader.open(lambda item: print("got", flush=True))
    print(subscription.route.port, reader.key.hex(), flush=True)
    await asyncio.Event().wait()

asyncio.run(write(*sys.argv[2:]) if sys.argv[1] == "write" else read())
"""


async def child(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CHILD, *arguments),
        cwd=Path(__file__).parents[3],
        stdout=asyncio.subprocess.PIPE,
    )


async def test_a_writer_that_is_killed_ends_all_its_streams_at_once() -> None:
    reader: Reader[bytes] = Reader(Codec(bytes))
    await reader.listen("127.0.0.1")
    got: list[bytes] = []
    subscriptions = [reader.open(got.append) for _ in range(10)]
    route = subscriptions[0].route
    process = await child("write", route.host, str(route.port), route.key.hex())
    await settled(lambda: len(got) == 10)

    async def hear(subscription: Any) -> None:
        with subscription:
            await subscription.finish(asyncio.Event().wait(), lambda error: True)

    hearing = [asyncio.create_task(hear(one)) for one in subscriptions]
    await asyncio.sleep(0)
    process.send_signal(signal.SIGKILL)
    results = await asyncio.gather(*hearing, return_exceptions=True)
    assert {type(result) for result in results} == {ChannelLost}
    assert reader.subscriptions == 0
    await process.wait()
    reader.stop()


async def test_a_reader_that_is_killed_cancels_all_work_for_it_at_once() -> None:
    process = await child("read")
    assert process.stdout is not None
    port, key = (await process.stdout.readline()).decode().split()
    writer: Writer[bytes] = Writer(Codec(bytes), 100)
    endless = Endless()

    async def answer(number: int) -> None:
        with writer.open(Route("127.0.0.1", int(port), bytes.fromhex(key), number)) as sender:
            await endless.work(sender.send)

    answering = [asyncio.create_task(answer(number)) for number in range(1, 11)]
    for _ in answering:
        assert await process.stdout.readline() == b"got\n"
    process.send_signal(signal.SIGKILL)
    results = await asyncio.gather(*answering, return_exceptions=True)
    assert {type(result) for result in results} == {ChannelLost}
    assert endless.cancelled == 10
    assert writer.links == 0
    await process.wait()


def strange(key: bytes) -> dict[str, bytes]:
    return {
        "another key": greeting(b"x" * 16) + b"\0\0\0\1\x90",
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "garbage after the key": greeting(key) + b"\0\0\0\2\xc1\xc1",
        "a giant length": greeting(key) + b"\xff\xff\xff\xff",
        "other types": greeting(key) + frame([[1, "0", [b"x"], 0]]),
        "text for bytes": greeting(key) + frame([[1, 0, ["x"], 0]]),
    }


def frame(value: Any) -> bytes:
    body = msgspec.msgpack.encode(value)
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize("what", list(strange(b"k" * 16)))
async def test_a_stranger_is_dropped_and_disturbs_nobody(what: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with ends() as both:
        got: list[bytes] = []
        done = asyncio.Event()

        async def steady(sink: Sink[bytes]) -> None:
            sink(b"a")
            await done.wait()
            sink(b"b")

        asking = asyncio.create_task(both.ask(steady, got.append))
        await settled(lambda: bool(got))
        answer, stranger = await asyncio.open_connection("127.0.0.1", own_wire_port(both))
        stranger.write(strange(both.reader.key)[what])
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await answer.readexactly(1)
        stranger.close()
        await settled(lambda: both.reader.links == 1)
        done.set()
        await asking
        assert got == [b"a", b"b"]
        key = both.reader.key
    said = caplog.text
    assert key.hex() not in said
    assert repr(key)[2:-1] not in said


async def test_who_says_nothing_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_GREETING_S", 0.05)
    async with ends() as both:
        answer, silent = await asyncio.open_connection("127.0.0.1", own_wire_port(both))
        silent.write(b"tk")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await answer.readexactly(1)
        silent.close()


async def test_entries_of_streams_that_are_unknown_are_dropped() -> None:
    async with ends() as both:
        both.wire.tamper = lambda body: [msgspec.msgpack.encode([[10**6, 0, [b"x"], 0], *entries(body)])]
        got: list[bytes] = []
        await both.ask(of(b"a"), got.append)
        assert got == [b"a"]
