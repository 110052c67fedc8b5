"""Connections without a network: a transport that notes what is written to it, and whose other end is the test."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from serve_app.channel.frame import GREETING_BYTES, Codec
from serve_app.channel.route import Route
from serve_app.channel.writer import Writer

KEY = b"0123456789abcdef"
Send = Callable[[bytes], None]


class Outlet(asyncio.Transport):
    """What is written is in `greeting` and `frames`, one for each write. One that is `stuck` ends only by force."""

    def __init__(self, protocol: asyncio.Protocol, stuck: bool = False) -> None:
        super().__init__()
        self.protocol = protocol
        self.stuck = stuck
        self.greeting = b""
        self.frames: list[list[list[Any]]] = []
        self.after_write: Callable[[], None] = lambda: None
        self.closed = self.aborted = self._lost = False
        protocol.connection_made(self)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: Any) -> None:
        if self.is_closing():
            raise RuntimeError("the handler is closed")  # as uvloop has it
        if not self.greeting:
            assert len(data) == GREETING_BYTES
            self.greeting = bytes(data)
            return
        assert int.from_bytes(data[:4], "big") == len(data) - 4
        self.frames.append(msgspec.msgpack.decode(data[4:]))
        self.after_write()

    def is_closing(self) -> bool:
        return self.closed or self._lost

    def close(self) -> None:
        if not self.closed and not self.stuck:
            self._lose()
        self.closed = True

    def abort(self) -> None:
        if not self._lost:
            self.aborted = True
            self._lose()

    def _lose(self) -> None:
        self._lost = True
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def items(self, number: int) -> list[bytes]:
        """All items of a stream so far; their positions fit."""
        items: list[bytes] = []
        for stream, position, some, _ in (entry for frame in self.frames for entry in frame):
            if stream == number:
                assert position == len(items)
                items += some
        return items

    def state(self, number: int) -> int | None:
        """What the last entry of a stream says of it."""
        states = [entry[3] for frame in self.frames for entry in frame if entry[0] == number]
        return states[-1] if states else None


class Outlets(list[Outlet]):
    """What the running event loop connects to from here on, once `reachable`; or `error`, which it gets instead."""

    def __init__(self) -> None:
        super().__init__()
        self.reachable = asyncio.Event()
        self.reachable.set()
        self.error: Exception | None = None
        self.stuck = False
        asyncio.get_running_loop().create_connection = self._connect  # type: ignore[method-assign, assignment]

    async def _connect(self, protocol: Callable[[], asyncio.Protocol], host: str, port: int) -> None:
        await self.reachable.wait()
        if self.error is not None:
            raise self.error
        self.append(Outlet(protocol(), self.stuck))


def route(number: int = 1, port: int = 7) -> Route:
    return Route("reader", port, KEY, number)


def new_writer(max_backlog_items: int = 100) -> Writer[bytes]:
    return Writer(Codec(bytes), max_backlog_items)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def stream(writer: Writer[bytes], work: Callable[[Send], Awaitable[None]], to: Route) -> "asyncio.Task[None]":
    """A stream that is open while `work` runs, in a task of its own."""

    async def run() -> None:
        with writer.open(to) as sender:
            await work(sender.send)

    return asyncio.create_task(run())


class Stream:
    """A stream into which the test puts the items, until it lets it end."""

    def __init__(self, writer: Writer[bytes], number: int = 1, port: int = 7) -> None:
        self.end = asyncio.Event()
        self.cancelled = 0
        self.task = stream(writer, self._work, route(number, port))

    async def _work(self, send: Send) -> None:
        self.send = send
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def opened(writer: Writer[bytes], count: int = 1, port: int = 7) -> list[Stream]:
    """Streams that are connected, with nothing in them yet."""
    streams = [Stream(writer, number, port) for number in range(1, count + 1)]
    await turns()
    return streams


async def ended(writer: Writer[bytes], *streams: Stream) -> None:
    for one in streams:
        one.end.set()
    await asyncio.gather(*(one.task for one in streams))
    await turns()
    await writer.stop()


class Endless:
    """Work that says one thing and goes on until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def work(self, send: Send) -> None:
        send(b"a")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
