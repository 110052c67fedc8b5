"""Ray's exceptions become those of our tree, and callers that leave cancel what they called."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from streams import collected, stream_of

from deployments.handles import EngineHandle, PostprocessHandle, TokenizerHandle
from serve_app.config import ChannelSection
from serve_app.errors import (
    BacklogFull,
    ChannelLost,
    ContextTooLong,
    EngineDied,
    HopUnavailable,
    Overloaded,
    RequestError,
)
from serve_app.messages import EngineRequest, RequestContext, Sampling, TokenizeRequest

CONTEXT = RequestContext("id", 0.0)
PLAIN = ChannelSection(enabled=False)
ENGINE_REQUEST = EngineRequest(CONTEXT, "id", (1,), 1, Sampling())


class Response:
    """A Serve response: awaited or iterated, it gives the items, then raises, waits or ends."""

    def __init__(self, items: list[Any], error: BaseException | None, hang: bool) -> None:
        self.cancelled = False
        self._items, self._error, self._hang = items, error, hang

    def cancel(self) -> None:
        self.cancelled = True

    def __await__(self) -> Any:
        return self._result().__await__()

    async def _result(self) -> Any:
        if self._error is not None:
            raise self._error
        if self._hang:
            await asyncio.Event().wait()
        return self._items[0]

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        for item in self._items:
            yield item
        if self._error is not None:
            raise self._error
        if self._hang:
            await asyncio.Event().wait()


class Handle:
    """A Serve handle whose every method gives the same response."""

    def __init__(self, *items: Any, error: BaseException | None = None, hang: bool = False) -> None:
        self.response = Response(list(items), error, hang)

    def options(self, **_: Any) -> "Handle":
        return self

    def __getattr__(self, name: str) -> "Handle":
        return self

    def remote(self, *_: Any) -> Response:
        return self.response


def task_error(cause: Exception) -> Exception:
    """As Ray raises it: an instance of the cause's class too."""
    error: Exception = RayTaskError("generate", "traceback", cause).as_instanceof_cause()
    return error


CASES = [
    (task_error(ContextTooLong("too long", "messages")), ContextTooLong),
    (BackPressureError(num_queued_requests=1, max_queued_requests=1), Overloaded),
    (DeploymentUnavailableError(None), HopUnavailable),
    (BacklogFull("not read"), BacklogFull),
    (task_error(BacklogFull("not read")), BacklogFull),
]
# What the loss of a replica looks like: to Ray, to this end of the channel, and to the other.
LOST = [ActorDiedError(), ChannelLost("broke"), task_error(ChannelLost("broke"))]


@pytest.mark.parametrize(("error", "kind"), [*CASES, *((error, EngineDied) for error in LOST)])
async def test_the_engines_errors_are_translated(error: Exception, kind: type[RequestError]) -> None:
    handle = Handle((1,), error=error)
    with pytest.raises(kind) as raised:
        await collected(EngineHandle(handle, PLAIN), ENGINE_REQUEST)
    assert type(raised.value) is kind
    assert not handle.response.cancelled


@pytest.mark.parametrize(("error", "kind"), [*CASES, *((error, HopUnavailable) for error in LOST)])
async def test_a_unary_calls_errors_are_translated(error: Exception, kind: type[RequestError]) -> None:
    handle = Handle(error=error)
    with pytest.raises(kind) as raised:
        await TokenizerHandle(handle).tokenize(TokenizeRequest(CONTEXT))
    assert type(raised.value) is kind
    assert not handle.response.cancelled


async def test_an_error_from_outside_the_tree_stays_what_it_is() -> None:
    with pytest.raises(RayTaskError):
        await PostprocessHandle(Handle(error=task_error(KeyError("x"))), PLAIN).report()


async def test_a_consumer_that_leaves_cancels_the_call() -> None:
    handle = Handle(1, 2, hang=True)
    stream = stream_of(EngineHandle(handle, PLAIN), ENGINE_REQUEST)
    assert await anext(stream) == 1
    assert not handle.response.cancelled
    await stream.aclose()
    assert handle.response.cancelled


async def test_a_stream_that_ended_is_not_cancelled() -> None:
    handle = Handle(1, 2)
    assert await collected(EngineHandle(handle, PLAIN), ENGINE_REQUEST) == [1, 2]
    assert not handle.response.cancelled


async def test_a_cancelled_caller_cancels_a_unary_call() -> None:
    handle = Handle(hang=True)
    task = asyncio.create_task(PostprocessHandle(handle, PLAIN).report())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert handle.response.cancelled


async def test_a_callee_that_was_cancelled_is_an_error_and_not_a_silent_end() -> None:
    with pytest.raises(EngineDied):
        await collected(EngineHandle(Handle((1,), error=asyncio.CancelledError()), PLAIN), ENGINE_REQUEST)
    with pytest.raises(HopUnavailable):
        await TokenizerHandle(Handle(error=asyncio.CancelledError())).tokenize(TokenizeRequest(CONTEXT))
