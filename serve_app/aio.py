"""What asyncio lacks for streams: several merged into one, one bounded by a deadline, and a count of what is open."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from serve_app.errors import DeadlineExceeded

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    """What a pump puts into the queue: a value, the stream's error, or its end."""

    value: T | None = None
    error: BaseException | None = None
    end: bool = False


def task_count() -> int:
    """asyncio tasks of the running event loop."""
    return len(asyncio.all_tasks())


def own_cancellation() -> bool:
    """Whether a CancelledError in the running task is its own, and not that of something it waits for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all streams as they come. The first error ends the others; so does leaving the loop."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield item
        return
    # One place per stream: a slow consumer holds the streams back instead of letting a queue grow.
    queue: asyncio.Queue[_Item[T]] = asyncio.Queue(maxsize=len(streams))

    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            arrived = await queue.get()
            if arrived.error is not None:
                raise arrived.error
            if arrived.end:
                running -= 1
            else:
                yield cast(T, arrived.value)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def within(deadline_s: float, work: Awaitable[T]) -> T:
    """The work's result, or DeadlineExceeded and the work cancelled at `deadline_s` (wall clock)."""
    try:
        async with asyncio.timeout(deadline_s - time.time()) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise  # the work's own
        raise DeadlineExceeded("The request's deadline passed before it was done.") from None


async def _pump(stream: AsyncGenerator[T, None], queue: "asyncio.Queue[_Item[T]]") -> None:
    """Moves a stream's items into the queue, then its error or its end."""
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put(_Item(value=item))
        await queue.put(_Item(end=True))
    except asyncio.CancelledError as error:
        if own_cancellation():
            raise
        await queue.put(_Item(error=error))  # not this task's: something that the stream waits for was cancelled
    except Exception as error:  # noqa: BLE001 - carried over to the consumer, who raises it
        await queue.put(_Item(error=error))


async def until(deadline_s: float, stream: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The stream's items until `deadline_s` (wall clock); DeadlineExceeded is raised where it would wait past it."""
    async with aclosing(stream):
        while True:
            try:
                item = await within(deadline_s, anext(stream))
            except StopAsyncIteration:
                return
            yield item
