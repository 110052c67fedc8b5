"""Both ends together over loopback: order, frames, bounds, cancellation and the end of streams."""

import asyncio
import random

import msgspec
import pytest
from wire import Ends, ends, entries, of, settled

from serve_app.aio import Enough, Sink, pulled
from serve_app.channel import reader as reading
from serve_app.channel.frame import FAILED, WHOLE, Codec
from serve_app.channel.reader import Reader
from serve_app.channel.writer import Writer
from serve_app.errors import BacklogFull, ChannelLost, InvalidRequest


async def collect(both: Ends, *items: bytes, pause: bool = True) -> list[bytes]:
    got: list[bytes] = []
    await both.ask(of(*items, pause=pause), got.append)
    return got


async def test_items_come_in_order_and_whole() -> None:
    async with ends() as both:
        items = [b"%d" % number for number in range(300)]
        assert await collect(both, *items) == items
        assert await collect(both, *items, pause=False) == items
        assert await collect(both) == []
        assert both.wire.connections == 1


@pytest.mark.parametrize("seed", range(3))
async def test_many_streams_at_once_each_get_their_own(seed: int) -> None:
    numbers = random.Random(seed)

    async def one(both: Ends, number: int) -> None:
        items = [b"%d/%d " % (number, step) * numbers.choice([1, 1, 1, 5000]) for step in range(numbers.randrange(60))]

        async def work(sink: Sink[bytes]) -> None:
            for item in items:
                sink(item)
                if numbers.random() < 0.5:
                    await asyncio.sleep(numbers.random() * 0.003)

        got: list[bytes] = []
        await both.ask(work, got.append)
        assert got == items

    async with ends() as both:
        await asyncio.gather(*(one(both, number) for number in range(100)))
        assert both.wire.connections == 1


async def test_an_item_leaves_by_itself_while_nothing_follows() -> None:
    arrived = asyncio.Event()

    async def work(sink: Sink[bytes]) -> None:
        sink(b"first")
        await arrived.wait()  # would wait for ever if the item waited for company, or for a timer that is not there

    async with ends() as both:
        await both.ask(work, lambda _: arrived.set())


async def test_what_all_streams_make_in_one_turn_is_one_frame() -> None:
    seen: list[int] = []
    async with ends() as both:
        both.wire.tamper = lambda body: seen.append(len(entries(body))) or [body]
        step = asyncio.Event()

        async def work(sink: Sink[bytes]) -> None:
            await step.wait()
            sink(b"a")
            sink(b"b")

        streams = [asyncio.create_task(both.ask(work, lambda _: None)) for _ in range(50)]
        await settled(lambda: len(both.writer._links) == 1)
        await settled(lambda: len(next(iter(both.writer._links.values())).senders) == 50)
        step.set()
        await asyncio.gather(*streams)
    assert seen[0] == 50


async def test_while_the_connection_is_stalled_items_merge_and_none_is_lost() -> None:
    sizes: list[int] = []
    async with ends(max_backlog_items=100_000) as both:

        def look(body: bytes) -> list[bytes]:
            sizes.extend(len(items) for _, _, items, _ in entries(body))
            return [body]

        both.wire.tamper = look
        both.wire.open.clear()
        items = [bytes([number % 256]) * 4096 for number in range(5000)]  # far more than the system's buffers hold
        got: list[bytes] = []
        asking = asyncio.create_task(both.ask(of(*items), got.append))
        await settled(lambda: any(link._held_back and link._transport for link in both.writer._links.values()))
        await settled(lambda: not any(link.senders for link in both.writer._links.values()))
        both.wire.open.set()
        await asking
        assert got == items
        assert max(sizes) > 1


async def test_a_backlog_at_the_writer_ends_its_stream_alone_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_SECOND_S", 0.05)  # the end of the stream does not come through
    async with ends(max_backlog_items=50) as both:
        both.wire.open.clear()
        got: list[bytes] = []

        async def steady(sink: Sink[bytes]) -> None:
            for number in range(30):
                sink(b"%d" % number)
                await asyncio.sleep(0)
            await both.wire.open.wait()

        other = asyncio.create_task(both.ask(steady, got.append))
        endless = of(*[b"x" * 65536] * 10_000)
        with pytest.raises(BacklogFull, match="channel.max_backlog_items"):
            await both.ask(endless, lambda _: None)
        monkeypatch.setattr(reading, "_SECOND_S", 60)
        both.wire.open.set()
        await other
        assert got == [b"%d" % number for number in range(30)]


async def test_a_slow_consumer_delays_no_other_and_is_ended_at_its_limit() -> None:
    async with ends() as both:
        ended = asyncio.Event()

        async def endless(sink: Sink[bytes]) -> None:
            try:
                while True:
                    sink(b"x")
                    await asyncio.sleep(0)
            finally:
                ended.set()

        async def slow() -> None:
            async for _ in pulled(lambda sink: both.ask(endless, sink), 20):
                await ended.wait()

        slowly = asyncio.create_task(slow())
        while not ended.is_set():
            assert await collect(both, b"a", b"b") == [b"a", b"b"]
        with pytest.raises(BacklogFull):
            await slowly


async def test_a_reader_that_is_cancelled_cancels_the_work_and_what_still_comes_has_no_effect() -> None:
    async with ends() as both:
        cancelled, got = asyncio.Event(), list[bytes]()

        async def work(sink: Sink[bytes]) -> None:
            try:
                sink(b"a")
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                sink(b"too late")
                cancelled.set()
                raise

        asking = asyncio.create_task(both.ask(work, got.append))
        await settled(lambda: bool(got))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await cancelled.wait()
        assert await collect(both, b"next") == [b"next"]
        assert got == [b"a"]


@pytest.mark.parametrize("error", [Enough(), ValueError("of the consumer")])
async def test_a_sink_that_raises_ends_the_call_with_that(error: Exception) -> None:
    async with ends() as both:
        cancelled, got = asyncio.Event(), list[bytes]()

        async def work(sink: Sink[bytes]) -> None:
            try:
                for item in (b"a", b"b", b"c"):
                    sink(item)
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        def sink(item: bytes) -> None:
            got.append(item)
            if len(got) == 2:
                raise error

        with pytest.raises(type(error)):
            await both.ask(work, sink)
        await cancelled.wait()
        assert got == [b"a", b"b"]


async def test_an_error_of_the_work_comes_after_all_items_before_it() -> None:
    async with ends() as both:
        got: list[bytes] = []

        async def work(sink: Sink[bytes]) -> None:
            sink(b"a")
            sink(b"b")
            raise InvalidRequest("no", "top_k")

        both.wire.open.clear()  # the call is back long before the frame
        asking = asyncio.create_task(both.ask(work, got.append))
        await settled(lambda: any(link._transport and not link.senders for link in both.writer._links.values()))
        assert not asking.done()
        both.wire.open.set()
        with pytest.raises(InvalidRequest, match="no"):
            await asking
        assert got == [b"a", b"b"]


async def test_an_error_that_is_not_the_writers_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_SECOND_S", 3600)
    async with ends() as both:

        async def never_reached(sink: Sink[bytes]) -> None:
            raise ConnectionError("the replica is gone")

        both.wire.open.clear()
        with pytest.raises(ConnectionError):
            await both.ask(never_reached, print, lambda error: False)
        both.wire.open.set()


async def test_a_whole_stream_does_not_wait_for_its_call() -> None:
    async with ends() as both:
        back = asyncio.Event()
        with both.reader.open(lambda _: None) as subscription:

            async def call() -> None:
                await both.answer(of(b"a"), subscription.route)
                await back.wait()

            await subscription.finish(call(), lambda error: True)
        assert len(reading._left) == 1
        back.set()
    assert not reading._left


async def test_the_end_of_a_stream_that_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_SECOND_S", 0.05)
    async with ends() as both:

        def drop_ends(body: bytes) -> list[bytes]:
            kept = [one for one in entries(body) if one[3] not in (WHOLE, FAILED)]
            return [msgspec.msgpack.encode(kept)]

        both.wire.tamper = drop_ends
        with pytest.raises(ChannelLost, match="has not come"):
            await collect(both, b"a")


async def test_stopping_the_writer_sends_what_is_there() -> None:
    async with ends() as both:
        got: list[bytes] = []

        async def last_words(sink: Sink[bytes]) -> None:
            sink(b"a")
            await settled(lambda: bool(got))
            both.wire.open.clear()
            sink(b"b")
            sink(b"c")
            asyncio.get_running_loop().call_later(0.01, both.wire.open.set)
            await both.writer.stop()

        with pytest.raises(ChannelLost):
            await both.ask(last_words, got.append)
        assert got == [b"a", b"b", b"c"]


async def test_a_whole_stream_stays_whole_when_the_writer_stops_behind_it() -> None:
    async with ends() as both:
        got: list[bytes] = []
        with both.reader.open(got.append) as subscription:

            async def call() -> None:
                await both.answer(of(b"a", b"b"), subscription.route)
                await both.writer.stop()

            await subscription.finish(call(), lambda error: True)
        assert got == [b"a", b"b"]


async def test_one_reader_has_several_writers_and_one_writer_several_readers() -> None:
    async with ends() as both:
        assert await collect(both, b"a") == [b"a"]
        own, both.writer = both.writer, Writer(Codec(bytes), 100)
        assert await collect(both, b"b") == [b"b"]
        assert both.reader.links == 2
        await both.writer.stop()
        both.writer = own
        await settled(lambda: both.reader.links == 1)

        other: Reader[bytes] = Reader(Codec(bytes))
        await other.listen("127.0.0.1")
        await other.listen("127.0.0.1")  # once is enough
        got: list[bytes] = []
        with other.open(got.append) as subscription:
            await subscription.finish(both.answer(of(b"c"), subscription.route), lambda error: True)
        assert got == [b"c"]
        assert both.writer.links == 2
        assert await collect(both, b"d") == [b"d"]
        other.stop()
        await settled(lambda: both.writer.links == 1)
