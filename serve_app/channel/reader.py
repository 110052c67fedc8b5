"""The end that asks: listens for writers, and gives each item to the request it belongs to.

Nothing here waits for a request's consumer, so a slow one delays nobody: its own sink bounds what it holds
(`serve_app/aio.py`).
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Generic, TypeVar, cast

from serve_app.channel.frame import GREETING_BYTES, KEY_BYTES, OPEN, WHOLE, Codec, Deframer, Entry, Malformed, greets
from serve_app.channel.keep_alive import keep_alive
from serve_app.channel.route import Route
from serve_app.errors import ChannelLost

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Time in which a new connection has to show its key.
_GREETING_S = 5.0
# The last frame and the call's answer travel apart; whichever is second has this long.
_SECOND_S = 2.0
# A last frame behind many others, of a busy reader, has this long while those come in.
_BEHIND_S = 30.0


class Reader(Generic[T]):
    """All streams that come to this replica from the writers of one hop. `listen` before the first `open`."""

    def __init__(self, codec: Codec[T]) -> None:
        self.codec = codec
        self.key = secrets.token_bytes(KEY_BYTES)
        self.frames = 0
        self._numbers = itertools.count(1)
        self._subscriptions: dict[int, Subscription[T]] = {}
        self._links: set[_Link[T]] = set()
        self._server: asyncio.Server | None = None
        self._stopped = False
        self._address = ("", 0)
        self._starting = asyncio.Lock()

    @property
    def links(self) -> int:
        """Connections of writers that have shown the key."""
        return sum(link.greeted for link in self._links)

    @property
    def subscriptions(self) -> int:
        """Streams that are open."""
        return len(self._subscriptions)

    async def listen(self, host: str) -> None:
        """On a free port of `host`; a second call does nothing. Raises OSError."""
        if self._server is not None:
            return
        async with self._starting:
            if self._server is None:
                loop = asyncio.get_running_loop()
                server = await loop.create_server(lambda: _Link(self), host, 0)
                self._address = server.sockets[0].getsockname()[:2]
                self._server = server

    def open(self, sink: Callable[[T], None]) -> "Subscription[T]":
        """A new stream. `sink` takes its items one by one, in the event loop; what it raises ends the stream."""
        number = next(self._numbers)
        subscription = Subscription(Route(*self._address, self.key, number), sink, self)
        self._subscriptions[number] = subscription
        return subscription

    def stop(self) -> None:
        """Listens no more and drops all connections; streams that are still open fail."""
        self._stopped = True
        if self._server is not None:
            self._server.close()
        for link in tuple(self._links):
            link.drop()
        for subscription in tuple(self._subscriptions.values()):
            subscription.fail(ChannelLost("The replica that reads this stream stops."))

    def joined(self, link: "_Link[T]") -> None:
        self._links.add(link)
        if self._stopped:  # it was being accepted meanwhile
            link.drop()

    def left(self, link: "_Link[T]") -> None:
        self._links.discard(link)

    def take(self, body: bytes, link: "_Link[T]") -> None:
        """One frame. Entries of streams that nobody reads any more are dropped."""
        self.frames += 1
        for entry in self.codec.decode(body):
            subscription = self._subscriptions.get(entry.number)
            if subscription is not None:
                subscription.deliver(entry, link)

    def forget(self, number: int) -> None:
        self._subscriptions.pop(number, None)


class Subscription(Generic[T]):
    """One stream as its reader sees it: a context, at whose end it is closed. `received` counts its items."""

    def __init__(self, route: Route, sink: Callable[[T], None], reader: Reader[T]) -> None:
        self.route = route
        self.received = 0
        self._sink = sink
        self._reader = reader
        self._link: _Link[T] | None = None
        self._ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> "Subscription[T]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.forget(self.route.number)
        if self._link is not None:
            self._link.subscriptions.discard(self)
        if not self._ended.cancel() and not self._ended.cancelled():
            self._ended.exception()  # asked for, or asyncio complains of an error that nobody saw

    def deliver(self, entry: Entry[T], link: "_Link[T]") -> None:
        """Gives an entry's items to the sink."""
        if self._ended.done():
            return
        if self._link is not link:
            if self._link is not None:
                self.fail(ChannelLost("Two replicas answer the same request."))
                return
            self._link = link
            link.subscriptions.add(self)
        if entry.position != self.received:
            self.fail(ChannelLost(f"Item {entry.position} came after {self.received} items."))
            return
        self.received += len(entry.items)
        try:
            for item in entry.items:
                self._sink(item)
        except StopIteration as error:  # no future takes one
            self.fail(RuntimeError(f"A sink raised {error!r}."))
            return
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the consumer's, who gets it from `finish`
            self.fail(error)
            return
        if entry.state != OPEN:
            self._ended.set_result(entry.state == WHOLE)

    def fail(self, error: BaseException) -> None:
        """Ends the stream with an error."""
        if not self._ended.done():
            self._ended.set_exception(error)

    async def finish(self, call: Awaitable[object], by_writer: Callable[[BaseException], bool]) -> None:
        """Returns when the stream has ended whole, whether or not `call` has returned by then; else raises why.

        `call` is the request itself. It is cancelled where the stream fails here or this is cancelled, and left to
        itself where the stream is whole. Of an error of the call `by_writer` says whether the writer raised it, who
        then has sent the end of the stream too. Raises what the call or the sink raises, and ChannelLost.
        """
        calling = asyncio.ensure_future(call)
        try:
            await asyncio.wait((calling, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not self._ended.done():
                await self._second(calling, by_writer)
            if self._ended.result():
                return
            await asyncio.wait((calling,), timeout=_SECOND_S)
            if calling.done():
                calling.result()
            raise ChannelLost("The stream failed and its call does not say why.")
        except BaseException:
            calling.cancel()
            raise
        finally:
            _leave(calling)

    async def _second(self, calling: "asyncio.Future[object]", by_writer: Callable[[BaseException], bool]) -> None:
        """The call was first. What it raises counts, but not before the items that the writer has sent ahead of it."""
        if calling.cancelled() or ((error := calling.exception()) is not None and not by_writer(error)):
            calling.result()
        if isinstance(error, ChannelLost) and self._link is None:
            raise error  # the writer never got through, so no end will come
        seen, latest = -1, asyncio.get_running_loop().time() + _BEHIND_S
        while not self._ended.done():
            if self._reader.frames == seen or asyncio.get_running_loop().time() >= latest:
                calling.result()
                raise ChannelLost("The call has returned and the end of its stream has not come.")
            seen = self._reader.frames
            await asyncio.wait((self._ended,), timeout=_SECOND_S)


# The event loop holds tasks by weak references only.
_left: "set[asyncio.Future[object]]" = set()


def _leave(calling: "asyncio.Future[object]") -> None:
    """Lets a call end by itself; what it says then changes nothing."""
    if calling.done():
        _heed(calling)
        return
    _left.add(calling)
    calling.add_done_callback(_left.discard)
    calling.add_done_callback(_heed)


def _heed(calling: "asyncio.Future[object]") -> None:
    if not calling.cancelled() and (error := calling.exception()) is not None:
        logger.debug("a call ended after its stream: %r", error)


class _Link(asyncio.Protocol, Generic[T]):
    """A connection of one writer."""

    def __init__(self, reader: Reader[T]) -> None:
        self.subscriptions: set[Subscription[T]] = set()
        self._reader = reader
        self._deframer: Deframer | None = None
        self._greeting = b""

    @property
    def greeted(self) -> bool:
        """Whether it has shown the key."""
        return self._deframer is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        keep_alive(self._transport)
        self._reader.joined(self)
        self._limit = asyncio.get_running_loop().call_later(_GREETING_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._deframer is None:
            self._greeting += data
            if len(self._greeting) < GREETING_BYTES:
                return
            shown, data = self._greeting[:GREETING_BYTES], self._greeting[GREETING_BYTES:]
            self._greeting = b""
            self._limit.cancel()
            if not greets(shown, self._reader.key):
                logger.warning("a connection to the token channel without its key was dropped")
                self._transport.abort()
                return
            self._deframer = Deframer()
        try:
            for body in self._deframer.feed(data):
                self._reader.take(body, self)
        except Malformed as error:
            logger.error("a writer of the token channel is dropped, for it sent %s", error)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._limit.cancel()
        self._reader.left(self)
        for subscription in tuple(self.subscriptions):
            subscription.fail(ChannelLost("The replica at the other end of the token channel is lost."))

    def drop(self) -> None:
        """Closes the connection at once."""
        self._transport.abort()
