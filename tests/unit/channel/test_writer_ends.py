"""The writer's end when its work is cancelled, its reader is lost or was never there, or its replica stops."""

import asyncio
from typing import Any

import pytest
from outlet import KEY, Outlets, Send, ended, new_writer, opened, route, stream, turns

from serve_app.channel import writer as writing
from serve_app.channel.frame import OPEN, WHOLE
from serve_app.errors import ChannelLost, InvalidRequest


async def test_cancelled_work_sends_nothing_more() -> None:
    outlets, writer = Outlets(), new_writer()
    (other,) = await opened(writer)

    async def work(send: Send) -> None:
        send(b"a")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            send(b"too late")
            raise

    one = stream(writer, work, route(2))
    await turns()
    one.cancel()
    other.send(b"x")
    with pytest.raises(asyncio.CancelledError):
        await one
    await turns()
    assert outlets[0].items(2) == [b"a"]
    assert outlets[0].state(2) == OPEN
    assert outlets[0].items(1) == [b"x"]
    await ended(writer, other)


@pytest.mark.parametrize("abrupt", [ConnectionResetError("gone"), None])
async def test_a_lost_reader_cancels_all_work_for_it_and_for_nobody_else(abrupt: Exception | None) -> None:
    outlets, writer = Outlets(), new_writer()
    lost, (kept,) = await opened(writer, 20), await opened(writer, 1, port=8)
    outlets[0].protocol.connection_lost(abrupt)
    results = await asyncio.gather(*(one.task for one in lost), return_exceptions=True)
    assert {type(result) for result in results} == {ChannelLost}
    assert [one.cancelled for one in lost] == [1] * 20
    assert writer.links == 1
    kept.send(b"a")
    await ended(writer, kept)
    assert outlets[1].items(1) == [b"a"]
    assert kept.cancelled == 0


async def test_work_that_cleans_up_after_its_reader_is_cancelled_once() -> None:
    Outlets()
    writer, cleaned = new_writer(), []

    async def tidy(send: Send) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await turns(10)
            cleaned.append(True)

    answering = stream(writer, tidy, route())
    await turns()
    await writer.stop()
    with pytest.raises(ChannelLost):
        await answering
    assert cleaned


async def test_a_cancellation_by_somebody_else_stays_one_when_the_reader_is_lost_too() -> None:
    outlets, writer = Outlets(), new_writer()
    (one,) = await opened(writer)
    one.task.cancel()
    outlets[0].protocol.connection_lost(None)
    with pytest.raises(asyncio.CancelledError):
        await one.task
    assert writer.links == 0


@pytest.mark.parametrize("late", [False, True])
async def test_a_lost_reader_leaves_no_cancellation_behind(late: bool) -> None:
    outlets, writer = Outlets(), new_writer()
    said: list[type[BaseException]] = []

    async def answer() -> None:
        sender = writer.open(route())
        await turns()
        if late:
            outlets[0].protocol.connection_lost(None)
        try:
            with sender:
                outlets[0].protocol.connection_lost(None)
                with pytest.raises(ChannelLost):
                    sender.send(b"a")
                await asyncio.sleep(0)
        except ChannelLost:
            await turns()  # would be cancelled by what is left of the cancellation
            said.append(ChannelLost)

    task = asyncio.create_task(answer())
    await task
    assert said == [ChannelLost]
    assert task.cancelling() == 0


async def test_an_error_of_the_work_is_not_hidden_by_a_lost_reader() -> None:
    outlets, writer = Outlets(), new_writer()

    async def work(send: Send) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise InvalidRequest("its own") from None

    answering = stream(writer, work, route())
    await turns()
    outlets[0].protocol.connection_lost(None)
    with pytest.raises(InvalidRequest, match="its own"):
        await answering


async def test_after_a_lost_connection_the_next_stream_has_a_new_one() -> None:
    outlets, writer = Outlets(), new_writer()
    (lost,) = await opened(writer)
    outlets[0].protocol.connection_lost(None)
    (next_one,) = await opened(writer)  # while the first still ends
    next_one.send(b"a")
    await turns()
    assert outlets[1].items(1) == [b"a"]
    assert isinstance((await asyncio.gather(lost.task, return_exceptions=True))[0], ChannelLost)
    assert writer.links == 1
    await ended(writer, next_one)
    assert writer.links == 0


@pytest.mark.parametrize("error", [ConnectionRefusedError("no"), OSError("no route to host")])
async def test_a_reader_that_refuses_is_lost_and_may_be_there_for_the_next(error: OSError) -> None:
    outlets, writer = Outlets(), new_writer()
    outlets.error = error
    lost = await opened(writer, 3)
    results = await asyncio.gather(*(one.task for one in lost), return_exceptions=True)
    assert {type(result) for result in results} == {ChannelLost}
    assert writer.links == 0
    outlets.error = None
    (one,) = await opened(writer)
    one.send(b"a")
    await ended(writer, one)
    assert outlets[0].items(1) == [b"a"]


def test_a_reader_that_cannot_be_reached_is_given_up_in_five_seconds(run_virtual: Any) -> None:
    async def main() -> None:
        outlets, writer = Outlets(), new_writer()
        outlets.reachable.clear()
        streams = await opened(writer, 3)
        streams[0].send(b"a")
        results = await asyncio.gather(*(one.task for one in streams), return_exceptions=True)
        assert {type(result) for result in results} == {ChannelLost}
        assert asyncio.get_running_loop().time() == pytest.approx(5)
        assert writer.links == 0
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


async def test_a_stopping_writer_sends_what_a_slow_reader_held_back_and_whole_streams_stay_whole() -> None:
    outlets, writer = Outlets(), new_writer()
    streams = await opened(writer, 3)
    outlets[0].protocol.pause_writing()
    outlets[0].after_write = outlets[0].protocol.pause_writing
    for one in streams:
        one.send(b"a")
        one.send(b"b")
    for one in streams[1:]:
        one.end.set()
    await turns()
    await writer.stop()
    assert outlets[0].frames == [
        [[1, 0, [b"a", b"b"], OPEN], [2, 0, [b"a", b"b"], WHOLE], [3, 0, [b"a", b"b"], WHOLE]],
    ]
    assert outlets[0].closed
    assert not outlets[0].aborted
    results = await asyncio.gather(*(one.task for one in streams), return_exceptions=True)
    assert [type(result) for result in results] == [ChannelLost, type(None), type(None)]


async def test_a_stopping_writer_sends_all_frames_of_a_large_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_FRAME_ITEMS", 2)
    outlets, writer = Outlets(), new_writer()
    streams = await opened(writer, 5)
    outlets[0].after_write = outlets[0].protocol.pause_writing
    outlets[0].protocol.pause_writing()
    for one in streams:
        one.send(b"a")
        one.end.set()
    await turns()
    await writer.stop()
    assert [len(frame) for frame in outlets[0].frames] == [2, 2, 1]
    assert [outlets[0].state(number) for number in range(1, 6)] == [WHOLE] * 5


async def test_a_writer_that_stops_while_it_connects_still_sends_what_it_has() -> None:
    outlets, writer = Outlets(), new_writer()
    outlets.reachable.clear()
    streams = await opened(writer, 2)
    for one in streams:
        one.send(b"a")
        one.end.set()
    await turns()
    stopping = asyncio.create_task(writer.stop())
    await turns()
    assert not stopping.done()
    outlets.reachable.set()
    await stopping
    assert outlets[0].frames == [[[1, 0, [b"a"], WHOLE], [2, 0, [b"a"], WHOLE]]]
    assert outlets[0].closed
    assert writer.links == 0
    await asyncio.gather(*(one.task for one in streams))


@pytest.mark.parametrize("reachable", [False, True])
def test_a_stopping_writer_waits_two_seconds_for_readers_that_take_nothing(run_virtual: Any, reachable: bool) -> None:
    async def main() -> None:
        outlets, writer = Outlets(), new_writer()
        outlets.stuck = True
        if not reachable:
            outlets.reachable.clear()
        (one,) = await opened(writer)
        await writer.stop()
        assert asyncio.get_running_loop().time() == pytest.approx(2)
        with pytest.raises(ChannelLost):
            await one.task
        assert [outlet.aborted for outlet in outlets] == [True] * reachable
        assert writer.links == 0
        await turns()
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


async def test_a_stop_that_is_cancelled_leaves_nothing_open() -> None:
    outlets, writer = Outlets(), new_writer()
    outlets.stuck = True
    (one,) = await opened(writer)
    stopping = asyncio.create_task(writer.stop())
    await turns()
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    with pytest.raises(ChannelLost):
        await one.task
    await turns()
    assert writer.links == 0
    assert outlets[0].aborted


async def test_what_is_said_of_a_lost_reader_has_no_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    outlets, writer = Outlets(), new_writer()
    outlets.error = ConnectionRefusedError("no")
    (one,) = await opened(writer)
    with pytest.raises(ChannelLost):
        await one.task
    assert "reader:7" in caplog.text
    for said in (caplog.text, repr(route()), str(route()), f"{route()}", repr(writer), repr(writer.open(route(2)))):
        assert KEY.decode() not in said
        assert KEY.hex() not in said
    await writer.stop()
