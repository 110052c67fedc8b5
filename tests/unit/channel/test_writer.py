"""The writer's end by itself, over connections that only note what is written: when items leave, in which frames."""

import asyncio
from typing import Any

import pytest
from outlet import KEY, Outlets, Send, ended, new_writer, opened, route, stream, turns

from serve_app.channel import writer as writing
from serve_app.channel.frame import FAILED, OPEN, WHOLE, greeting
from serve_app.errors import BacklogFull, InvalidRequest


async def test_each_item_leaves_at_the_end_of_the_turn_it_was_put_in() -> None:
    outlets, writer = Outlets(), new_writer()
    (one,) = await opened(writer)
    for count in range(1, 50):
        one.send(b"%d" % count)
        assert len(outlets[0].frames) == count - 1
        await asyncio.sleep(0)
        assert outlets[0].frames[-1] == [[1, count - 1, [b"%d" % count], OPEN]]
        assert len(outlets[0].frames) == count
    await ended(writer, one)
    assert outlets[0].frames[-1] == [[1, 49, [], WHOLE]]
    assert outlets[0].greeting == greeting(KEY)


async def test_what_all_streams_put_in_within_one_turn_leaves_as_one_frame() -> None:
    outlets, writer = Outlets(), new_writer()
    streams = await opened(writer, 200)
    for item in (b"a", b"b", b"c"):
        for one in streams:
            one.send(item)
    await asyncio.sleep(0)
    assert outlets[0].frames == [[[number, 0, [b"a", b"b", b"c"], OPEN] for number in range(1, 201)]]
    await ended(writer, *streams)
    assert len(outlets[0].frames) == 2  # the second: all 200 ends
    assert len(outlets) == 1


async def test_the_last_items_and_the_end_of_a_stream_are_one_entry() -> None:
    outlets, writer = Outlets(), new_writer()
    (one,) = await opened(writer)
    one.send(b"a")
    await turns()

    async def work(send: Send) -> None:
        send(b"x")
        send(b"y")

    await stream(writer, work, route(2))
    await turns()
    assert outlets[0].frames[1:] == [[[2, 0, [b"x", b"y"], WHOLE]]]
    await ended(writer, one)


async def test_sending_uses_no_timer() -> None:
    outlets, writer = Outlets(), new_writer()
    (one,) = await opened(writer)
    loop: Any = asyncio.get_running_loop()
    later, at, timers = loop.call_later, loop.call_at, []
    loop.call_later = loop.call_at = lambda *arguments, **_: timers.append(arguments)
    one.send(b"a")
    await turns()
    outlets[0].protocol.pause_writing()
    one.send(b"b")
    outlets[0].protocol.resume_writing()
    await turns()
    loop.call_later, loop.call_at = later, at
    assert outlets[0].items(1) == [b"a", b"b"]
    assert not timers
    await ended(writer, one)


async def test_while_the_reader_does_not_keep_up_items_merge_by_stream_and_leave_in_order() -> None:
    outlets, writer = Outlets(), new_writer()
    streams = await opened(writer, 3)
    outlets[0].protocol.pause_writing()
    for count in range(30):
        for one in streams:
            one.send(b"%d" % count)
        await asyncio.sleep(0)
    assert outlets[0].frames == []
    outlets[0].protocol.resume_writing()
    items = [b"%d" % count for count in range(30)]
    assert outlets[0].frames == [[[number, 0, items, OPEN] for number in (1, 2, 3)]]
    streams[1].send(b"next")
    await asyncio.sleep(0)
    assert outlets[0].frames[1:] == [[[2, 30, [b"next"], OPEN]]]
    await ended(writer, *streams)


async def test_what_is_put_in_before_the_connection_is_there_leaves_with_it() -> None:
    outlets, writer = Outlets(), new_writer()
    outlets.reachable.clear()
    (one,) = await opened(writer)
    one.send(b"a")
    await turns()
    one.send(b"b")
    outlets.reachable.set()
    await turns()
    assert outlets[0].frames == [[[1, 0, [b"a", b"b"], OPEN]]]
    await ended(writer, one)


async def test_a_backlog_ends_its_stream_alone_with_what_was_taken_before_it() -> None:
    outlets, writer = Outlets(), new_writer(max_backlog_items=3)
    (other,) = await opened(writer)

    async def greedy(send: Send) -> None:
        outlets[0].protocol.pause_writing()
        for count in range(10):
            send(b"%d" % count)
            await asyncio.sleep(0)

    with pytest.raises(BacklogFull, match="3 pieces of it wait, the most that channel.max_backlog_items") as full:
        await stream(writer, greedy, route(2))
    assert full.value.param == "channel.max_backlog_items"
    for item in (b"a", b"b", b"c"):
        other.send(item)
    outlets[0].protocol.resume_writing()
    assert outlets[0].frames == [[[2, 0, [b"0", b"1", b"2"], FAILED], [1, 0, [b"a", b"b", b"c"], OPEN]]]
    await ended(writer, other)
    assert outlets[0].state(1) == WHOLE


async def test_much_within_one_turn_is_no_backlog_of_a_reader_that_keeps_up() -> None:
    outlets, writer = Outlets(), new_writer(max_backlog_items=3)
    (one,) = await opened(writer)
    items = [b"%d" % count for count in range(20)]
    for item in items:
        one.send(item)
    await ended(writer, one)
    assert outlets[0].items(1) == items
    assert outlets[0].state(1) == WHOLE


async def test_a_backlog_of_many_streams_leaves_in_frames_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_FRAME_ITEMS", 20)
    outlets, writer = Outlets(), new_writer()
    streams = await opened(writer, 12)
    outlet = outlets[0]
    outlet.protocol.pause_writing()
    for count in range(5):
        for one in streams:
            one.send(b"%d" % count)
    outlet.after_write = lambda: len(outlet.frames) == 2 and outlet.protocol.pause_writing()
    outlet.protocol.resume_writing()
    assert [len(frame) for frame in outlet.frames] == [4, 4]  # the connection was full again; the rest waits
    for one in streams:
        one.send(b"5")
    await turns()
    assert len(outlet.frames) == 2
    outlet.protocol.resume_writing()
    assert all(outlet.items(number) == [b"%d" % count for count in range(6)] for number in range(1, 13))
    await ended(writer, *streams)


async def test_an_item_that_cannot_be_sent_ends_its_stream_alone(caplog: pytest.LogCaptureFixture) -> None:
    outlets, writer = Outlets(), new_writer()
    good, bad = await opened(writer, 2)
    good.send(b"a")
    bad.send(b"b")
    await turns()
    bad.send(object())  # type: ignore[arg-type]
    good.send(b"c")
    await turns()
    assert outlets[0].items(1) == [b"a", b"c"]
    assert outlets[0].frames[-1] == [[2, 1, [], FAILED], [1, 1, [b"c"], OPEN]]
    assert "cannot be sent" in caplog.text
    await ended(writer, good, bad)
    assert outlets[0].state(1) == WHOLE


async def test_work_that_fails_ends_its_stream_after_its_items() -> None:
    outlets, writer = Outlets(), new_writer()

    async def fails(send: Send) -> None:
        send(b"a")
        send(b"b")
        raise InvalidRequest("no", "top_k")

    with pytest.raises(InvalidRequest):
        await stream(writer, fails, route())
    await turns()
    assert outlets[0].frames == [[[1, 0, [b"a", b"b"], FAILED]]]
    await writer.stop()


async def test_nothing_is_written_to_a_connection_that_is_closed_and_not_yet_reported_lost() -> None:
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    outlets, writer = Outlets(), new_writer()
    (one,) = await opened(writer)
    one.send(b"a")
    await turns()
    one.send(b"b")  # leaves at the end of this turn
    outlets[0].abort()
    await turns()
    assert outlets[0].items(1) == [b"a"]
    assert not complaints
