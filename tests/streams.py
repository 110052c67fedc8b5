"""Pushed streams read item by item, and generators pushed: what tests of several hops need."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from serve_app.aio import Sink, pulled


async def stream_of(service: Any, request: Any) -> AsyncGenerator[Any, None]:
    """What `service.generate` pushes. Closing it cancels the work and waits for its end."""
    async with aclosing(pulled(partial(service.generate, request), 1_000_000)) as batches:
        async for batch in batches:
            for item in batch:
                yield item


async def collected(service: Any, request: Any) -> list[Any]:
    """Everything that `service.generate` pushes."""
    items: list[Any] = []
    await service.generate(request, items.append)
    return items


async def push(stream: AsyncGenerator[Any, None], sink: Sink[Any]) -> None:
    """Pushes a generator's items; it is closed at once where the sink has enough or this is cancelled."""
    async with aclosing(stream):
        async for item in stream:
            sink(item)


def pushing(generate: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., Any]:
    """Makes a generator method `generate(self, request)` a pushing one, `generate(self, request, sink)`."""

    async def pushed(self: Any, request: Any, sink: Sink[Any]) -> None:
        await push(generate(self, request), sink)

    return pushed
