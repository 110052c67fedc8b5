"""How a stream crosses a hop: over the token channel, or as a stream of Ray Serve's per request.

Both ends of both, for one hop. With the channel the request is a unary call that lasts as long as the generation, so
Ray Serve counts, drains, cancels and autoscales on it; its items come beside it (`serve_app/channel/`).
"""

import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle

from serve_app.aio import Sink, own_cancellation, pulled
from serve_app.channel.frame import Codec
from serve_app.channel.reader import Reader
from serve_app.channel.route import Route
from serve_app.channel.writer import Writer
from serve_app.config import ChannelSection

Request = TypeVar("Request")
T = TypeVar("T")


def uses_channel(section: ChannelSection) -> bool:
    """Whether streams go over the channel. Its connections are in the clear, Ray's own then are not."""
    return section.enabled and os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true")


class Asking(Generic[Request, T]):
    """The end that asks: one per handle. Raises what Ray raises, and ChannelLost; `handles.py` translates."""

    def __init__(self, handle: DeploymentHandle[Any], codec: Codec[T], section: ChannelSection) -> None:
        self._reader = Reader(codec) if uses_channel(section) else None
        self._generate = handle.generate if self._reader else handle.options(stream=True).stream

    async def generate(self, request: Request, sink: Sink[T]) -> None:
        """Gives `sink` the items; returns after the last."""
        if self._reader is None:
            await self._stream(request, sink)
            return
        await self._reader.listen(ray.util.get_node_ip_address())
        with self._reader.open(sink) as subscription:
            call = answered(self._generate.remote(request, subscription.route))
            await subscription.finish(call, by_writer=_raised_there)

    async def _stream(self, request: Request, sink: Sink[T]) -> None:
        response = self._generate.remote(request)
        taking = False
        try:
            async for item in response:
                taking = True
                sink(item)
                taking = False
        finally:
            # Left early: by a sink that has what it wanted, or by a cancelled task.
            if taking or own_cancellation():
                response.cancel()

    def stop(self) -> None:
        """With the replica."""
        if self._reader is not None:
            self._reader.stop()


class Answering(Generic[Request, T]):
    """The end that answers: one per replica, around what makes the items."""

    def __init__(
        self, work: Callable[[Request, Sink[T]], Awaitable[None]], codec: Codec[T], section: ChannelSection
    ) -> None:
        self._work = work
        self._writer = Writer(codec, section.max_backlog_items)
        self._max_backlog_items = section.max_backlog_items

    async def generate(self, request: Request, route: Route) -> None:
        """Items go to the reader at `route`; returns after the last."""
        with self._writer.open(route) as sender:
            await self._work(request, sender.send)

    async def stream(self, request: Request) -> AsyncGenerator[T, None]:
        """Items as a stream of Ray Serve's."""
        # Closed explicitly: a generator that is only dropped would abort its work when the collector gets to it.
        async with aclosing(pulled(partial(self._work, request), self._max_backlog_items)) as batches:
            async for batch in batches:
                for item in batch:
                    yield item

    async def stop(self) -> None:
        """With the replica: sends what is here."""
        await self._writer.stop()


async def answered(response: Any) -> Any:
    """A unary call's result; a cancelled caller cancels its callee."""
    try:
        return await response
    finally:
        if own_cancellation():
            response.cancel()


def _raised_there(error: BaseException) -> bool:
    """Whether the callee's own code raised it, and not Ray for want of a callee."""
    return isinstance(error, RayTaskError)
