"""The reader's end by itself: what it makes of a connection's bytes, however they are cut and whatever is wrong."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from outlet import Outlet, turns

from serve_app.aio import Enough
from serve_app.channel.frame import FAILED, OPEN, WHOLE, Codec, Entry, greeting
from serve_app.channel.reader import Reader, Subscription, _left, _Link
from serve_app.errors import ChannelLost, InvalidRequest

CODEC: Codec[bytes] = Codec(bytes)
with_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def connected(reader: Reader[bytes], greets: bool = True) -> Outlet:
    """A connection of a writer."""
    inlet = Outlet(_Link(reader))
    if greets:
        inlet.protocol.data_received(greeting(reader.key))
    return inlet


def receive(inlet: Outlet, *entries: Entry[bytes]) -> None:
    """One frame comes."""
    inlet.protocol.data_received(CODEC.encode(list(entries)))


def reading(subscription: Subscription[bytes], call: Awaitable[object], theirs: bool = True) -> "asyncio.Task[None]":
    """Whoever asks, until the stream has ended."""

    async def read() -> None:
        with subscription:
            await subscription.finish(call, lambda error: theirs)

    return asyncio.create_task(read())


async def never() -> None:
    await asyncio.Event().wait()


async def after(delay_s: float, error: Exception | None = None) -> None:
    await asyncio.sleep(delay_s)
    if error is not None:
        raise error


async def outcome(task: "asyncio.Task[None]") -> BaseException | None:
    return (await asyncio.gather(task, return_exceptions=True))[0]


pieces = st.lists(st.lists(st.binary(max_size=20), min_size=1, max_size=4), max_size=5)


def entries_of(number: int, pieces: list[list[bytes]]) -> list[Entry[bytes]]:
    entries, position = [], 0
    for items in pieces:
        entries.append(Entry(number, position, items))
        position += len(items)
    return [*entries, Entry(number, position, [], WHOLE)]


@with_fixtures
@given(st.lists(pieces, min_size=1, max_size=5), st.data())
def test_streams_are_whole_however_tcp_cuts_the_bytes_and_know_it_when_it_breaks_them_off(
    run_virtual: Any, streams: list[list[list[bytes]]], data: st.DataObject
) -> None:
    async def main() -> None:
        reader: Reader[bytes] = Reader(CODEC)
        got: list[list[bytes]] = [[] for _ in streams]
        subscriptions = [reader.open(some.append) for some in got]
        called = asyncio.Event()
        tasks = [reading(one, called.wait()) for one in subscriptions]
        waiting = [entries_of(one.route.number, pieces) for one, pieces in zip(subscriptions, streams, strict=True)]
        raw = greeting(reader.key)
        while any(waiting):  # frames of random streams, each stream in its order
            some = data.draw(st.lists(st.sampled_from([one for one in waiting if one]), min_size=1, unique_by=id))
            raw += CODEC.encode([one.pop(0) for one in some])
        inlet = connected(reader, greets=False)
        broken_off = data.draw(st.integers(0, len(raw)))
        cuts = sorted(data.draw(st.lists(st.integers(0, broken_off), max_size=8)))
        for begin, end in zip([0, *cuts], [*cuts, broken_off], strict=True):
            inlet.protocol.data_received(raw[begin:end])
        if broken_off == len(raw):
            assert [await outcome(task) for task in tasks] == [None] * len(tasks)
        inlet.abort()
        await turns()
        reader.stop()  # ends those of which nothing came
        for task, some, pieces in zip(tasks, got, streams, strict=True):
            sent = [item for items in pieces for item in items]
            error = await outcome(task)
            assert some == (sent if error is None else sent[: len(some)])
            assert error is None or isinstance(error, ChannelLost)
        assert (reader.subscriptions, reader.links) == (0, 0)
        called.set()
        await turns()
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


@st.composite
def faulty(draw: st.DrawFn) -> tuple[list[bytes], list[Entry[bytes]]]:
    """What was sent in a stream, and its entries after one was dropped, sent again, or overtaken by the next."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    items = [b"%d" % count for count in range(sum(sizes))]
    ends = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
    entries = entries_of(1, [items[end - size : end] for end, size in zip(ends, sizes, strict=True)])
    at = draw(st.integers(0, len(entries) - 2))
    fault = draw(st.sampled_from(["dropped", "again", "overtaken", "the end dropped"]))
    if fault == "dropped":
        del entries[at]
    elif fault == "again":
        entries.insert(draw(st.integers(at + 1, len(entries) - 1)), entries[at])
    elif fault == "overtaken":
        entries[at], entries[at + 1] = entries[at + 1], entries[at]
    else:
        entries.pop()
    return items, entries


@with_fixtures
@given(faulty(), st.booleans())
def test_entries_that_are_lost_repeated_or_overtaken_end_the_stream_as_lost(
    run_virtual: Any, fault: tuple[list[bytes], list[Entry[bytes]]], one_frame: bool
) -> None:
    async def main() -> None:
        sent, entries = fault
        reader: Reader[bytes] = Reader(CODEC)
        got: list[bytes] = []
        task = reading(reader.open(got.append), after(0))
        inlet = connected(reader)
        for some in [entries] if one_frame else [[entry] for entry in entries]:
            receive(inlet, *some)
        assert isinstance(await outcome(task), ChannelLost)
        assert got == sent[: len(got)]
        assert reader.subscriptions == 0
        assert not inlet.aborted

    run_virtual(main())


def test_the_call_may_return_before_the_end_of_its_stream_and_long_after(run_virtual: Any) -> None:
    async def main() -> None:
        reader: Reader[bytes] = Reader(CODEC)
        inlet, got, called = connected(reader), list[bytes](), asyncio.Event()
        before = reading(reader.open(got.append), after(1))
        afterwards = reading(reader.open(got.append), called.wait())
        receive(inlet, Entry(1, 0, [b"a"]), Entry(2, 0, [b"x"], WHOLE))
        await afterwards
        assert asyncio.get_running_loop().time() == 0
        assert len(_left) == 1
        await asyncio.sleep(2.9)
        assert not before.done()
        receive(inlet, Entry(1, 1, [b"b"], WHOLE))
        await before
        assert got == [b"a", b"x", b"b"]
        called.set()
        await turns()
        assert not _left

    run_virtual(main())


@pytest.mark.parametrize("state", [None, FAILED, 7])
def test_the_end_of_a_stream_and_its_call_wait_two_seconds_for_each_other(run_virtual: Any, state: int | None) -> None:
    async def main() -> None:
        reader: Reader[bytes] = Reader(CODEC)
        inlet = connected(reader)
        call = asyncio.ensure_future(after(1) if state is None else never())
        task = reading(reader.open(print), call)
        receive(inlet, Entry(1, 0, [], OPEN if state is None else state))
        assert isinstance(await outcome(task), ChannelLost)
        assert asyncio.get_running_loop().time() == pytest.approx(3 if state is None else 2)
        await turns()
        assert call.cancelled() == (state is not None)
        assert not _left

    run_virtual(main())


@pytest.mark.parametrize("busy_s", [9, 3600])
def test_an_end_that_is_behind_the_frames_of_others_is_waited_for(run_virtual: Any, busy_s: int) -> None:
    async def main() -> None:
        reader: Reader[bytes] = Reader(CODEC)
        inlet, got = connected(reader), list[bytes]()
        task = reading(reader.open(got.append), after(0))
        for _ in range(min(busy_s, 40)):
            await asyncio.sleep(1)
            receive(inlet, Entry(1000, 0, [b"of another"]))
        if busy_s == 9:
            receive(inlet, Entry(1, 0, [b"a"], WHOLE))
            await task
            assert got == [b"a"]
        else:
            assert task.done()
            assert isinstance(await outcome(task), ChannelLost)
        inlet.abort()
        await turns()

    run_virtual(main())


def test_an_error_of_the_writer_counts_once_the_end_of_its_stream_has_come(run_virtual: Any) -> None:
    async def main() -> None:
        reader: Reader[bytes] = Reader(CODEC)
        inlet, got = connected(reader), list[bytes]()
        call_first = reading(reader.open(got.append), after(0, InvalidRequest("first")))
        stream_first = reading(reader.open(got.append), after(1.9, InvalidRequest("second")))
        never_ended = reading(reader.open(got.append), after(0, InvalidRequest("third")))
        receive(inlet, Entry(2, 0, [b"x"], FAILED))
        await asyncio.sleep(1)
        assert not call_first.done()
        receive(inlet, Entry(1, 0, [b"a"], FAILED))
        assert "first" in str(await outcome(call_first))
        assert asyncio.get_running_loop().time() == pytest.approx(1)
        assert "second" in str(await outcome(stream_first))
        assert asyncio.get_running_loop().time() == pytest.approx(1.9)
        assert "third" in str(await outcome(never_ended))
        assert asyncio.get_running_loop().time() == pytest.approx(4)  # two seconds without a frame
        assert got == [b"x", b"a"]

    run_virtual(main())


@pytest.mark.parametrize(
    ("error", "theirs"),
    [(ConnectionError("no replica"), False), (ChannelLost("the writer's connection"), True)],
)
def test_a_call_whose_writer_never_got_through_fails_at_once(run_virtual: Any, error: Exception, theirs: bool) -> None:
    async def main() -> None:
        reader: Reader[bytes] = Reader(CODEC)
        assert await outcome(reading(reader.open(print), after(0, error), theirs)) is error
        assert asyncio.get_running_loop().time() == 0
        assert reader.subscriptions == 0

    run_virtual(main())


async def test_a_stream_that_is_left_before_its_end_leaves_nothing_behind() -> None:
    reader: Reader[bytes] = Reader(CODEC)
    inlet = connected(reader)
    with reader.open(print):
        receive(inlet, Entry(1, 3, []))  # it has failed, and nobody asks why
    with reader.open(print):
        receive(inlet, Entry(2, 0, []))
    link: Any = inlet.protocol
    assert (reader.subscriptions, link.subscriptions) == (0, set())


async def test_a_call_that_is_cancelled_by_others_fails_at_once() -> None:
    reader: Reader[bytes] = Reader(CODEC)
    call = asyncio.ensure_future(never())
    task = reading(reader.open(print), call)
    await turns()
    call.cancel()
    assert isinstance(await outcome(task), asyncio.CancelledError)


async def test_a_reader_that_is_cancelled_cancels_its_call_and_does_not_wait_for_it() -> None:
    reader: Reader[bytes] = Reader(CODEC)
    inlet, got, end = connected(reader), list[bytes](), asyncio.Event()

    async def stubborn() -> None:
        try:
            await never()
        finally:
            await end.wait()
            raise ValueError("nobody hears this")

    task = reading(reader.open(got.append), stubborn())
    receive(inlet, Entry(1, 0, [b"a"]))
    await turns()
    task.cancel()
    assert isinstance(await outcome(task), asyncio.CancelledError)
    assert (reader.subscriptions, len(_left)) == (0, 1)
    receive(inlet, Entry(1, 1, [b"late"]), Entry(1, 7, [b"later"], FAILED))
    assert got == [b"a"]
    assert not inlet.aborted
    end.set()
    await turns()
    assert not _left


@pytest.mark.parametrize(
    "error", [Enough(), ValueError("of the consumer"), StopIteration(), asyncio.CancelledError(), RecursionError()]
)
async def test_whatever_a_sink_raises_ends_its_stream_and_no_other(error: BaseException) -> None:
    reader: Reader[bytes] = Reader(CODEC)
    inlet, got, other = connected(reader), list[bytes](), list[bytes]()

    def sink(item: bytes) -> None:
        got.append(item)
        if item == b"b":
            raise error

    call = asyncio.ensure_future(never())
    failing = reading(reader.open(sink), call)
    going_on = reading(reader.open(other.append), after(0))
    receive(inlet, Entry(1, 0, [b"a", b"b", b"c"]), Entry(2, 0, [b"x"]))
    receive(inlet, Entry(1, 3, [b"d"], WHOLE), Entry(2, 1, [b"y"], WHOLE))
    raised = await outcome(failing)
    assert type(raised) is (RuntimeError if isinstance(error, StopIteration) else type(error))
    assert await outcome(going_on) is None
    assert got == [b"a", b"b"]
    assert other == [b"x", b"y"]
    await turns()
    assert call.cancelled()
    assert not inlet.aborted


async def test_a_lost_connection_ends_its_streams_and_no_others() -> None:
    reader: Reader[bytes] = Reader(CODEC)
    left, right = connected(reader), connected(reader)
    tasks = [reading(reader.open(lambda _: None), never() if rank % 2 == 0 else after(0)) for rank in range(20)]
    for number in range(1, 21):
        receive(left if number % 2 else right, Entry(number, 0, [b"a"]))
    assert reader.links == 2
    left.abort()
    lost = [await outcome(task) for task in tasks[::2]]
    assert {type(error) for error in lost} == {ChannelLost}
    assert reader.links == 1
    receive(right, *(Entry(number, 1, [], WHOLE) for number in range(2, 21, 2)))
    assert [await outcome(task) for task in tasks[1::2]] == [None] * 10
    assert reader.subscriptions == 0


async def test_a_stopping_reader_ends_every_stream_even_those_of_which_nothing_has_come() -> None:
    reader: Reader[bytes] = Reader(CODEC)
    await reader.listen("127.0.0.1")
    inlet = connected(reader)
    calls = [asyncio.ensure_future(never()) for _ in range(2)]
    tasks = [reading(reader.open(print), call) for call in calls]
    receive(inlet, Entry(1, 0, []))
    await turns()
    reader.stop()
    assert {type(await outcome(task)) for task in tasks} == {ChannelLost}
    await turns()
    assert inlet.aborted
    assert all(call.cancelled() for call in calls)
    late = Outlet(_Link(reader))  # it was being accepted
    await turns()
    assert late.aborted
    assert (reader.subscriptions, len(reader._links)) == (0, 0)
