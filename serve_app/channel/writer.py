"""The end that answers: takes items of many streams and sends them in frames, over one connection per reader.

An item leaves at the end of the event loop's turn it was put in, together with all others of that turn and that
reader. While a reader is not keeping up, items wait here, by stream, and leave in larger frames; a stream of which too
many wait is ended.
"""

import asyncio
import logging
from types import TracebackType
from typing import Generic, TypeVar, cast

from serve_app.channel.frame import FAILED, OPEN, WHOLE, Codec, Entry, greeting
from serve_app.channel.keep_alive import keep_alive
from serve_app.channel.route import Route
from serve_app.errors import BacklogFull, ChannelLost

T = TypeVar("T")

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0
_CLOSE_S = 2.0
# What may lie in the process ahead of the system's own buffers before frames are held back.
_HIGH_WATER_BYTES = 64 << 10
# After this many items a frame is full: what waited for a reader does not all become bytes at once.
_FRAME_ITEMS = 1 << 14


class Writer(Generic[T]):
    """All streams that leave this replica. `max_backlog_items` bounds what may wait of each."""

    def __init__(self, codec: Codec[T], max_backlog_items: int) -> None:
        self.codec = codec
        self.max_backlog_items = max_backlog_items
        self._links: dict[tuple[str, int, bytes], _Link[T]] = {}

    @property
    def links(self) -> int:
        """Readers there are, connected or about to be."""
        return len(self._links)

    def open(self, route: Route) -> "Sender[T]":
        """A stream to the reader of `route`, as a context; connects to it where that has not been done."""
        link = self._links.get(route.reader)
        if link is None:
            link = self._links[route.reader] = _Link(self, route)
        return Sender(route.number, link, self.max_backlog_items)

    async def stop(self) -> None:
        """Sends what is here and closes all connections, within a few seconds."""
        links = tuple(self._links.values())
        for link in links:
            link.close()
        try:
            if links:
                await asyncio.wait([asyncio.ensure_future(link.closed.wait()) for link in links], timeout=_CLOSE_S)
        finally:
            for link in links:
                link.drop()

    def left(self, route: Route, link: "_Link[T]") -> None:
        if self._links.get(route.reader) is link:
            del self._links[route.reader]


class Sender(Generic[T]):
    """One stream as its writer sees it: a context around the work that makes its items.

    Leaving it ends the stream, whole or, with an exception, failed. When the reader is lost the work is cancelled, and
    the context raises ChannelLost.
    """

    def __init__(self, number: int, link: "_Link[T]", max_backlog_items: int) -> None:
        self.number = number
        self.items: list[T] = []
        self.position = 0
        self.state = OPEN
        self._link = link
        self._max_backlog_items = max_backlog_items
        self._lost = False

    def __enter__(self) -> "Sender[T]":
        task = asyncio.current_task()
        assert task is not None
        if self._link.lost:
            raise ChannelLost("The replica that reads this stream is lost.")
        self._task = task
        self._cancelling = task.cancelling()
        self._link.senders.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.senders.discard(self)
        if self._lost:
            # As in asyncio.timeout: a cancellation of our own ends here, one of somebody else goes on.
            if self._task.uncancel() <= self._cancelling and (kind is None or issubclass(kind, asyncio.CancelledError)):
                raise ChannelLost("The replica that reads this stream is lost.") from error
            return
        if kind is not None and not issubclass(kind, Exception):
            self.items.clear()  # cancelled: nobody reads
            return
        self.state = WHOLE if kind is None else FAILED
        self._link.put(self)

    def send(self, item: T) -> None:
        """Puts an item in. Raises BacklogFull, and ChannelLost."""
        if self._lost:
            raise ChannelLost("The replica that reads this stream is lost.")
        if len(self.items) >= self._max_backlog_items:
            self._link.flush()  # much within one turn is no backlog
        if len(self.items) >= self._max_backlog_items:
            raise BacklogFull.of(self._max_backlog_items)
        self.items.append(item)
        self._link.put(self)

    def lose(self) -> None:
        """The reader is lost."""
        self._lost = True
        self._task.cancel()

    def entry(self) -> Entry[T] | None:
        """What is to be sent of it now."""
        if not self.items and self.state == OPEN:
            return None
        entry = Entry(self.number, self.position, self.items, self.state)
        self.position += len(self.items)
        self.items = []
        return entry


class _Link(asyncio.Protocol, Generic[T]):
    """The connection to one reader."""

    def __init__(self, writer: Writer[T], route: Route) -> None:
        self.senders: set[Sender[T]] = set()
        self.lost = False
        self.closed = asyncio.Event()
        self._writer = writer
        self._route = route
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._ready: dict[Sender[T], None] = {}  # in the order in which they were put in
        self._held_back = True  # until connected, and while the reader is not keeping up
        self._scheduled = False
        self._closing = False
        self._connecting = self._loop.create_task(self._connect())

    def put(self, sender: Sender[T]) -> None:
        """This sender has something."""
        self._ready[sender] = None
        if not self._scheduled and not self._held_back:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def close(self) -> None:
        """Sends what is here, as soon as there is a connection, then closes."""
        self._closing = True
        if self._transport is not None:
            while self._ready:
                self._held_back = False
                self.flush()
            self._transport.close()

    def drop(self) -> None:
        """Closes at once, whatever is still here."""
        if self.lost:
            return  # asyncio fails on a connection that was closed with something in its buffer
        self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._lose()

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                await self._loop.create_connection(lambda: self, self._route.host, self._route.port)
        except OSError as error:  # TimeoutError is one
            logger.warning("the token channel's reader at %s:%d: %r", self._route.host, self._route.port, error)
            self._lose()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        keep_alive(self._transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        self._transport.write(greeting(self._route.key))
        self.resume_writing()
        if self._closing:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._lose()

    def pause_writing(self) -> None:
        self._held_back = True

    def resume_writing(self) -> None:
        self._held_back = False
        self.flush()

    def flush(self) -> None:
        """Sends what is here, or leaves it here while frames are held back."""
        self._scheduled = False
        ready, self._ready = self._ready, {}
        entries: list[Entry[T]] = []
        items = 0
        for sender in ready:
            if self._held_back:
                self._ready[sender] = None
            elif (entry := sender.entry()) is not None:
                entries.append(entry)
                items += len(entry.items)
                if items >= _FRAME_ITEMS:
                    self._write(entries)
                    entries, items = [], 0
        self._write(entries)

    def _write(self, entries: list[Entry[T]]) -> None:
        # A connection that is closing is about to be lost, and uvloop fails on what is written to it meanwhile.
        if not entries or self._transport is None or self._transport.is_closing():
            return
        try:
            frame = self._writer.codec.encode(entries)
        except Exception:  # noqa: BLE001 - whatever the encoder makes of an item that is none
            frame = self._writer.codec.encode([self._sound(entry) for entry in entries])
        self._transport.write(frame)

    def _sound(self, entry: Entry[T]) -> Entry[T]:
        """The entry, or the end of a stream whose items cannot be sent; the others of the frame go on."""
        try:
            self._writer.codec.encode([entry])
        except Exception as error:  # noqa: BLE001 - as above
            logger.error("a stream of the token channel ends, for its items cannot be sent: %r", error)
            return Entry(entry.number, entry.position, [], FAILED)
        return entry

    def _lose(self) -> None:
        if self.lost:
            return  # once, or work that is cleaning up is cancelled again
        self.lost = True
        self.closed.set()
        self._writer.left(self._route, self)
        for sender in tuple(self.senders):
            sender.lose()
