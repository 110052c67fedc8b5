"""The wire format: what goes in comes out however it is cut, and what is none of ours is refused."""

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.channel.frame import (
    FAILED,
    GREETING_BYTES,
    KEY_BYTES,
    OPEN,
    WHOLE,
    Codec,
    Deframer,
    Entry,
    Malformed,
    greeting,
    greets,
)
from serve_app.messages import Closing, EngineDelta, EngineTimes, GenerateSummary, TokenLogprob

ENTRIES = st.lists(
    st.builds(
        Entry,
        number=st.integers(0, 2**40),
        position=st.integers(0, 2**40),
        items=st.lists(st.binary(max_size=50), max_size=5),
        state=st.sampled_from([OPEN, WHOLE, FAILED]),
    ),
    max_size=5,
)


@given(st.lists(ENTRIES, max_size=8), st.data())
def test_frames_come_out_as_they_went_in_however_the_connection_cuts_them(
    frames: list[list[Entry[bytes]]], data: st.DataObject
) -> None:
    codec: Codec[bytes] = Codec(bytes)
    raw = b"".join(codec.encode(entries) for entries in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=20)))
    deframer, got = Deframer(), list[Any]()
    for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        got += [codec.decode(body) for body in deframer.feed(raw[begin:end])]
    assert got == frames


DELTAS = [
    EngineDelta((1, 2, 49151)),
    EngineDelta((), "stop", True, cached_tokens=128, times=EngineTimes(1.0, None, 2.5, 3.25)),
    EngineDelta((5,), "length", logprobs=(TokenLogprob(5, -0.5, ((6, -1.5),)),), prompt_logprobs=(None,)),
]


def test_what_the_engine_makes_survives_the_wire() -> None:
    codec: Codec[EngineDelta] = Codec(EngineDelta)
    (body,) = Deframer().feed(codec.encode([Entry(1, 0, DELTAS)]))
    assert codec.decode(body) == [Entry(1, 0, DELTAS)]


def test_bytes_and_a_closing_are_told_apart() -> None:
    codec: Codec[bytes | Closing] = Codec(bytes | Closing)
    items = [b"data: x\n\n", Closing(b"", GenerateSummary((), (), 1, 2, 3))]
    (body,) = Deframer().feed(codec.encode([Entry(1, 0, items, FAILED)]))
    assert codec.decode(body)[0].items == items


def test_a_token_costs_a_few_bytes() -> None:
    frame = Codec(EngineDelta).encode([Entry(1000, 500, [EngineDelta((4711,))])])
    assert len(frame) < 32


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x93\x01\x02", msgspec.msgpack.encode([[1, 0, ["text"], 0]]), msgspec.msgpack.encode({"a": 1})]
    + [b"\x91\x95\x01\x00\x90\x00" + b"\x91" * 100_000],
)
def test_what_is_no_frame_of_ours_is_malformed(body: bytes) -> None:
    with pytest.raises(Malformed):
        Codec(bytes).decode(body)


def test_nothing_is_kept_of_frames_that_are_complete() -> None:
    deframer = Deframer()
    raw = Codec(bytes).encode([Entry(1, 0, [b"x" * 100_000])])
    for _ in range(10):
        assert len(list(deframer.feed(raw + raw[:10]))) == 1
        assert len(list(deframer.feed(raw[10:]))) == 1
    assert len(deframer._buffer) == 0


def test_a_length_that_no_frame_has_is_malformed_before_it_is_waited_for() -> None:
    with pytest.raises(Malformed, match="4294967295 bytes"):
        list(Deframer().feed(struct.pack(">I", 2**32 - 1)))


@pytest.mark.parametrize(
    "wrong", [b"", b"x" * GREETING_BYTES, greeting(b"k" * KEY_BYTES)[:-1], b"tkl9" + b"k" * KEY_BYTES]
)
def test_only_the_right_key_greets(wrong: Any) -> None:
    assert greets(greeting(b"k" * KEY_BYTES), b"k" * KEY_BYTES)
    assert not greets(wrong, b"k" * KEY_BYTES)
