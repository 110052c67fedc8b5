"""Who connects to a reader and is no writer of ours, or was one and went mad: dropped, and nobody else notices."""

import asyncio
import logging
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outlet import Outlet, turns
from wire import ends, settled

from serve_app.aio import Sink
from serve_app.channel.frame import GREETING_BYTES, Codec, greeting
from serve_app.channel.reader import Reader, _Link
from serve_app.errors import ChannelLost


def strange(key: bytes) -> dict[str, bytes]:
    return {
        "another key": greeting(b"x" * 16) + b"\0\0\0\1\x90",
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "garbage after the key": greeting(key) + b"\0\0\0\2\xc1\xc1",
        "a giant length": greeting(key) + b"\xff\xff\xff\xff",
        "other types": greeting(key) + frame([[1, "0", [b"x"], 0]]),
        "text for bytes": greeting(key) + frame([[1, 0, ["x"], 0]]),
        "too deep": greeting(key) + b"\0\1\x86\xa6\x91\x95\1\0\x90\0" + b"\x91" * 100_000,
        "a list that claims to be long": greeting(key) + b"\0\0\0\5\xdd\xff\xff\xff\xff",
        "bytes that claim to be long": greeting(key) + b"\0\0\0\x0a\x91\x94\1\0\x91\xc6\xff\xff\xff\xff",
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
        answer, stranger = await asyncio.open_connection("127.0.0.1", both.reader._address[1])
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


def knock(reader: Reader[bytes]) -> Outlet:
    """Somebody connects."""
    return Outlet(_Link(reader))


def buffered(inlet: Outlet) -> int:
    """Bytes that are kept of a connection."""
    link: Any = inlet.protocol
    return len(link._greeting) + (len(link._deframer._buffer) if link._deframer else 0)


def test_who_does_not_show_the_key_within_five_seconds_is_dropped(run_virtual: Any) -> None:
    async def main() -> None:
        reader: Reader[bytes] = Reader(Codec(bytes))
        silent, slow, right = (knock(reader) for _ in range(3))
        right.protocol.data_received(greeting(reader.key))
        for byte in greeting(reader.key)[:-1]:
            slow.protocol.data_received(bytes([byte]))
            await asyncio.sleep(0.2)
        await asyncio.sleep(5 - 0.2 * (GREETING_BYTES - 1) - 0.01)
        assert not silent.aborted
        assert not slow.aborted
        await asyncio.sleep(0.02)
        assert silent.aborted
        assert slow.aborted
        await asyncio.sleep(3600)
        assert not right.aborted
        assert (reader.links, len(reader._links)) == (1, 1)
        right.abort()
        await turns()

    run_virtual(main())


async def test_who_leaves_before_showing_the_key_leaves_no_timer() -> None:
    reader: Reader[bytes] = Reader(Codec(bytes))
    inlet = knock(reader)
    limit = inlet.protocol._limit  # type: ignore[attr-defined]
    inlet.protocol.data_received(b"tkl")
    inlet.abort()
    await turns()
    assert limit.cancelled()
    assert not reader._links


async def test_a_greeting_may_come_byte_by_byte_and_frames_right_behind_it() -> None:
    reader: Reader[bytes] = Reader(Codec(bytes))
    got: list[bytes] = []
    subscription = reader.open(got.append)
    inlet = knock(reader)
    for byte in greeting(reader.key) + frame([[1, 0, [b"a"], 1]]):
        assert not got
        inlet.protocol.data_received(bytes([byte]))
    assert got == [b"a"]
    with subscription:
        await subscription.finish(asyncio.sleep(0), lambda error: True)
    reader.stop()
    await turns()


@pytest.mark.parametrize("rank", range(GREETING_BYTES))
async def test_a_key_that_is_wrong_in_any_byte_is_wrong_and_what_follows_is_not_read(rank: int) -> None:
    reader: Reader[bytes] = Reader(Codec(bytes))
    got: list[bytes] = []
    with reader.open(got.append):
        shown = bytearray(greeting(reader.key))
        shown[rank] ^= 1
        inlet = knock(reader)
        inlet.protocol.data_received(bytes(shown) + frame([[1, 0, [b"a"], 0]]))
        assert inlet.aborted
        assert not got
    await turns()
    assert (reader.links, reader._links) == (0, set())


async def test_of_a_frame_that_is_too_long_nothing_is_kept_and_what_came_before_it_counts() -> None:
    reader: Reader[bytes] = Reader(Codec(bytes))
    got: list[bytes] = []
    subscription = reader.open(got.append)
    inlet = knock(reader)
    inlet.protocol.data_received(greeting(reader.key) + frame([[1, 0, [b"a"], 0]]) + b"\x40\0\0\1" + b"x" * 100_000)
    assert inlet.aborted
    with subscription, pytest.raises(ChannelLost):
        await subscription.finish(asyncio.sleep(60), lambda error: True)
    await turns()
    assert got == [b"a"]


async def test_of_a_long_frame_only_what_has_come_is_kept_and_after_it_nothing() -> None:
    reader: Reader[bytes] = Reader(Codec(bytes))
    inlet = knock(reader)
    inlet.protocol.data_received(greeting(reader.key) + b"\x40\0\0\0" + b"x" * 1000)
    assert buffered(inlet) < 1100
    inlet.abort()
    await turns()
    other = knock(reader)
    other.protocol.data_received(greeting(reader.key))
    body = frame([[number, 0, [b"x" * 1000], 0] for number in range(100, 1100)])
    for _ in range(10):
        for begin in range(0, len(body), 65536):
            other.protocol.data_received(body[begin : begin + 65536])
    assert buffered(other) == 0
    assert reader.subscriptions == 0
    other.abort()
    await turns()


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda some: st.lists(some, max_size=5) | st.dictionaries(st.text(max_size=3), some, max_size=3),
    max_leaves=6,
)
an_entry = st.tuples(st.integers(0, 3), st.integers(-1, 3), st.lists(st.binary() | values), st.integers(0, 9))
anything = st.binary() | st.builds(frame, values) | st.builds(frame, st.lists(an_entry, max_size=4))


@settings(max_examples=60)
@given(st.lists(anything, min_size=1, max_size=3).map(b"".join))
def test_whatever_a_writer_sends_the_streams_of_others_go_on(sent: bytes) -> None:
    async def main() -> None:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        reader: Reader[bytes] = Reader(Codec(bytes))
        got: list[bytes] = []
        for _ in range(10):
            reader.open(lambda _: None)
        subscription = reader.open(got.append)
        good, mad = knock(reader), knock(reader)
        for inlet in (good, mad):
            inlet.protocol.data_received(greeting(reader.key))
        good.protocol.data_received(frame([[11, 0, [b"a"], 0]]))
        mad.protocol.data_received(sent)
        assert buffered(mad) <= GREETING_BYTES + len(sent)
        good.protocol.data_received(frame([[11, 1, [b"b"], 1]]))
        with subscription:
            await subscription.finish(asyncio.sleep(0), lambda error: True)
        assert got == [b"a", b"b"]
        assert not good.aborted
        reader.stop()
        await turns()
        assert not reader._links
        for one in tuple(reader._subscriptions.values()):
            one.__exit__(None, None, None)
        assert not complaints

    asyncio.run(main())
