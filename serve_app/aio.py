"""Two things asyncio lacks for streams: several merged into one, and one bounded by a deadline. Both close what they read from."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TypeVar

from serve_app.errors import DeadlineExceeded

T = TypeVar("T")

_END = object()


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncIterator[T]:
    """Items of all streams as they come. The first error ends the others; so does leaving the loop."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield item
        return
    # One place per stream: a slow consumer holds the streams back instead of letting a queue grow.
    queue: asyncio.Queue[T | BaseException | object] = asyncio.Queue(maxsize=len(streams))

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(item)
            await queue.put(_END)
        except Exception as error:  # noqa: BLE001 - carried over to the consumer, who raises it
            await queue.put(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is _END:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item  # type: ignore[misc]  # neither the end nor an error: an item of a stream
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(deadline_s: float, stream: AsyncGenerator[T, None]) -> AsyncIterator[T]:
    """The stream's items until `deadline_s` (wall clock); DeadlineExceeded is raised where it would wait past it."""
    async with aclosing(stream):
        while True:
            try:
                async with asyncio.timeout(deadline_s - time.time()):
                    item = await anext(stream)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineExceeded("The request's deadline passed before it was done.") from None
            yield item
