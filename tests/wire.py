"""A token channel between two ends in one process, over a wire that can stall, be cut, and tamper with frames."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from serve_app.aio import Sink
from serve_app.channel.frame import GREETING_BYTES, Codec, Deframer
from serve_app.channel.reader import Reader, _left
from serve_app.channel.route import Route
from serve_app.channel.writer import Writer

Work = Callable[[Sink[bytes]], Awaitable[None]]


class Wire:
    """A relay in front of a reader. While `open` is clear nothing passes; `tamper` sees each frame's body."""

    def __init__(self, port: int) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.tamper: Callable[[bytes], list[bytes]] = lambda body: [body]
        self.frames = 0
        self.connections = 0
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self.server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Ends every connection now."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for end in self._ends:
            end.transport.abort()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def stop(self) -> None:
        self.server.close()
        await self.cut()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._ends.append(writer)
        task = asyncio.create_task(self._relay(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, inner: asyncio.StreamReader, outer: asyncio.StreamWriter) -> None:
        try:
            towards_reader, there = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            outer.transport.abort()
            return
        self._ends.append(there)
        watching = asyncio.create_task(self._watch(towards_reader, outer))
        try:
            there.write(await inner.readexactly(GREETING_BYTES))
            deframer = Deframer()
            while data := await inner.read(65536):
                await self.open.wait()
                for body in deframer.feed(data):
                    self.frames += 1
                    for one in self.tamper(body):
                        there.write(len(one).to_bytes(4, "big") + one)
                await there.drain()
            there.close()  # what was sent before the end arrives
            await there.wait_closed()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            watching.cancel()
            there.transport.abort()
            outer.transport.abort()

    async def _watch(self, towards_reader: asyncio.StreamReader, outer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await towards_reader.read()
        outer.transport.abort()


class Ends:
    """A reader and a writer with a wire between them."""

    def __init__(self, max_backlog_items: int) -> None:
        self.reader: Reader[bytes] = Reader(Codec(bytes))
        self.writer: Writer[bytes] = Writer(Codec(bytes), max_backlog_items)

    async def ask(
        self, work: Work, sink: Sink[bytes], by_writer: Callable[[BaseException], bool] = lambda error: True
    ) -> None:
        """One request: the writer does `work`, its items come to `sink`. As `deployments/streams.py` does it."""
        with self.reader.open(sink) as subscription:
            route = Route("127.0.0.1", self.wire.port, self.reader.key, subscription.route.number)
            await subscription.finish(self.answer(work, route), by_writer)

    async def answer(self, work: Work, route: Route) -> None:
        with self.writer.open(route) as sender:
            await work(sender.send)


@asynccontextmanager
async def ends(max_backlog_items: int = 1000) -> AsyncGenerator[Ends, None]:
    """Both ends, at the end of which nothing may be open or have gone wrong unseen."""
    complaints: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    both = Ends(max_backlog_items)
    await both.reader.listen("127.0.0.1")
    both.wire = Wire(both.reader.open(print).route.port)
    both.reader._subscriptions.clear()
    await both.wire.start()
    try:
        yield both
        await settled(lambda: not _left)
        assert both.reader.subscriptions == 0
    finally:
        await both.writer.stop()
        both.reader.stop()
        await both.wire.stop()
    await settled(lambda: not both.reader._links and not both.writer.links)
    await settled(lambda: len(asyncio.all_tasks()) == 1)
    assert not complaints, complaints


async def settled(condition: Callable[[], bool]) -> None:
    """Returns once it holds; the test's own limit ends one that never does."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.001)


def of(*items: bytes, pause: bool = True) -> Work:
    """Work that makes these items, one per turn of the event loop or all in one."""

    async def work(sink: Sink[bytes]) -> None:
        for item in items:
            sink(item)
            if pause:
                await asyncio.sleep(0)

    return work


def entries(body: bytes) -> list[list[Any]]:
    """A frame's entries, to be looked at and tampered with."""
    decoded: list[list[Any]] = msgspec.msgpack.decode(body)
    return decoded
