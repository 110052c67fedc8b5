"""The wire format: a greeting, then frames, each four bytes of length and a MessagePack array of entries. Pure.

Types are checked where a frame is decoded, and nothing of it is code: no pickle.
"""

import hmac
import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

# What an entry says of its stream: more may follow, it has ended whole, or it has ended and the call says why.
OPEN, WHOLE, FAILED = 0, 1, 2

KEY_BYTES = 16
# A connection begins with this and the reader's key. The digit is the format's version.
_MAGIC = b"tkl1"
GREETING_BYTES = len(_MAGIC) + KEY_BYTES

_LENGTH = struct.Struct(">I")
# Against a writer gone mad; the largest honest item is one whole JSON body.
_MAX_FRAME_BYTES = 1 << 30


class Malformed(Exception):
    """What came is no frame of ours; the connection is of no use any more."""


class Entry(msgspec.Struct, Generic[T], frozen=True, array_like=True):
    """What one stream produced since its last entry.

    `number` is the stream's at its reader; `position` counts the items before this entry, so that none can be lost or
    come twice unseen; `state` is OPEN, WHOLE or FAILED.
    """

    number: int
    position: int
    items: list[T]
    state: int = OPEN


class Codec(Generic[T]):
    """Entries to frames and back, for items of one type."""

    def __init__(self, item_type: Any) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(list[Entry[item_type]]).decode

    def encode(self, entries: list[Entry[T]]) -> bytes:
        """One frame."""
        body = self._encode(entries)
        return _LENGTH.pack(len(body)) + body

    def decode(self, body: bytes) -> list[Entry[T]]:
        """A frame's entries, from what `Deframer` gives. Raises Malformed."""
        try:
            entries: list[Entry[T]] = self._decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise Malformed(str(error)) from error
        return entries


class Deframer:
    """Bytes as they come to bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that `data` completes. Raises Malformed."""
        self._buffer += data
        begin = 0
        while len(self._buffer) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, begin)
            if length > _MAX_FRAME_BYTES:
                raise Malformed(f"a frame of {length} bytes")
            end = begin + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            yield bytes(memoryview(self._buffer)[begin + _LENGTH.size : end])
            begin = end
        del self._buffer[:begin]


def greeting(key: bytes) -> bytes:
    """What a writer sends first."""
    return _MAGIC + key


def greets(data: bytes, key: bytes) -> bool:
    """Whether the first GREETING_BYTES of a connection show the key; in constant time."""
    return hmac.compare_digest(data, greeting(key))
