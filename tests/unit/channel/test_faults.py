"""What happens to streams when a wire is cut, a process is killed, frames are lost, or a stranger connects."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from outlet import Endless
from wire import Ends, Wire, ends, entries, of, settled

from serve_app.aio import Sink
from serve_app.channel import reader as reading
from serve_app.channel import writer as writing
from serve_app.channel.frame import Codec
from serve_app.channel.route import Route
from serve_app.channel.writer import Writer
from serve_app.errors import ChannelLost


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


async def test_a_cut_before_anything_has_come_ends_both_sides_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_SECOND_S", 3600)
    async with ends() as both:
        cancelled: list[bool] = []

        async def silent(_: Sink[bytes]) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(True)

        asking = [asyncio.create_task(both.ask(silent, print)) for _ in range(10)]
        await settled(lambda: both.reader.links == 1)
        await both.wire.cut()
        results = await asyncio.gather(*asking, return_exceptions=True)
        assert {type(result) for result in results} == {ChannelLost}
        assert len(cancelled) == 10


async def test_a_reader_that_listens_no_more_keeps_its_connections_and_gets_no_new_ones() -> None:
    async with ends() as both:
        go_on, got = asyncio.Event(), list[bytes]()

        async def work(sink: Sink[bytes]) -> None:
            sink(b"a")
            await go_on.wait()
            sink(b"b")

        asking = asyncio.create_task(both.ask(work, got.append))
        await settled(lambda: bool(got))
        both.wire.server.close()
        go_on.set()
        await asking
        assert got == [b"a", b"b"]
        await both.wire.cut()
        await settled(lambda: both.writer.links == 0)
        with pytest.raises(ChannelLost):
            await both.ask(Endless().work, got.append)
        assert got == [b"a", b"b"]


async def test_a_reader_that_stops_ends_its_streams() -> None:
    async with ends() as both:
        endless, got = Endless(), list[bytes]()
        asking = asyncio.create_task(both.ask(endless.work, got.append))
        await settled(lambda: bool(got))
        both.reader.stop()
        with pytest.raises(ChannelLost):
            await asking
        await settled(lambda: endless.cancelled == 1)


async def test_entries_of_streams_that_are_unknown_are_dropped() -> None:
    async with ends() as both:
        both.wire.tamper = lambda body: [msgspec.msgpack.encode([[10**6, 0, [b"x"], 0], *entries(body)])]
        got: list[bytes] = []
        await both.ask(of(b"a"), got.append)
        assert got == [b"a"]
