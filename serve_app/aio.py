"""What asyncio lacks for streams: a pushed stream that is read by pulling, work done together, a deadline, and a count
of what is open.

Within the service streams are pushed: who makes items calls a `Sink` with each, at once and without a task of its own
to wake. Only the last reader, who writes to a socket and may have to wait, pulls.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from serve_app.errors import BacklogFull, DeadlineExceeded

T = TypeVar("T")

# Takes an item. What it raises ends the stream.
Sink = Callable[[T], None]


class Enough(Exception):
    """Raised by a sink that has all it wanted: whoever pushes stops, and nothing has gone wrong."""


def task_count() -> int:
    """asyncio tasks of the running event loop."""
    return len(asyncio.all_tasks())


def own_cancellation() -> bool:
    """Whether a CancelledError in the running task is its own, and not that of something it waits for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def pulled(push: Callable[[Sink[T]], Awaitable[None]], max_items: int) -> AsyncGenerator[list[T], None]:
    """What `push` gives its sink, to be read: each time all that has come since the last time, then what it raises.

    Leaving the loop cancels `push`. A reader that lets more than `max_items` wait ends it with BacklogFull.
    """
    items: list[T] = []
    arrived = asyncio.Event()

    def sink(item: T) -> None:
        if len(items) >= max_items:
            raise BacklogFull.of(max_items)
        items.append(item)
        arrived.set()

    pushing = asyncio.ensure_future(push(sink))
    pushing.add_done_callback(lambda _: arrived.set())
    try:
        while True:
            if items:
                batch, items = items, []
                yield batch
            elif pushing.done():
                break
            else:
                arrived.clear()
                await arrived.wait()
        if pushing.cancelled():
            raise RuntimeError("What makes the stream was cancelled from within.")
        pushing.result()
    finally:
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)


async def together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Does all of them at once. The first error cancels the others and is raised."""
    if len(works) == 1:
        await works[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def within(deadline_s: float, work: Awaitable[T]) -> T:
    """The work's result, or DeadlineExceeded and the work cancelled at `deadline_s` (wall clock)."""
    try:
        async with asyncio.timeout(deadline_s - time.time()) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise  # the work's own
        raise DeadlineExceeded("The request's deadline passed before it was done.") from None
