"""Typed clients over Ray Serve handles: what the library sees of the other hops.

Here and nowhere else Ray's exceptions become ours, and a cancelled caller cancels its callee. A handle's method is
looked up once: each look-up makes a new handle with a router of its own (Ray Serve 2.60).
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from serve_app.aio import own_cancellation
from serve_app.errors import EngineDied, HopUnavailable, Overloaded, RequestError
from serve_app.messages import (
    Closing,
    Detokenized,
    EngineDelta,
    EngineRequest,
    GenerateRequest,
    HopReport,
    PathReport,
    RequestContext,
    RequestMetrics,
    TokenIds,
    Tokenized,
    TokenizeRequest,
)

T = TypeVar("T")

# Seconds after which a caller is advised to retry a refusal whose end cannot be computed.
_RETRY_AFTER_S = 1.0


class TokenizerHandle:
    """See `TokenizerClient` in `serve_app/path.py`."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._tokenize = handle.tokenize
        self._detokenize = handle.detokenize

    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        return await _unary("tokenizer", Tokenized, self._tokenize, request)

    async def detokenize(self, context: RequestContext, ids: TokenIds) -> Detokenized:
        return await _unary("tokenizer", Detokenized, self._detokenize, context, ids)


class PostprocessHandle:
    """See `PostprocessClient` in `serve_app/path.py`."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._generate = handle.options(stream=True).generate
        self._report = handle.report

    def generate(self, request: GenerateRequest) -> AsyncGenerator[bytes | Closing, None]:
        return _stream("postprocess", self._generate, request)

    async def report(self) -> PathReport:
        return await _unary("postprocess", PathReport, self._report)


class EngineHandle:
    """See `EngineClient` in `serve_app/postprocess/service.py`."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._generate = handle.options(stream=True).generate
        self._report = handle.report

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        return _stream("engine", self._generate, request)

    async def report(self) -> PathReport:
        return await _unary("engine", PathReport, self._report)


class InsightHandle:
    """See `InsightClient` in `serve_app/insight/service.py`."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._report = handle.report
        self._view = handle.view
        self._requests = handle.requests

    async def report(self, report: HopReport) -> None:
        await _unary("insight", type(None), self._report, report)

    async def view(self) -> bytes:
        return await _unary("insight", bytes, self._view)

    async def requests(self, last: int | None, request_id: str | None) -> tuple[RequestMetrics, ...]:
        return await _unary("insight", tuple[RequestMetrics, ...], self._requests, last, request_id)


async def _unary(hop: str, returns: type[T], method: Any, *arguments: Any) -> T:
    """Awaits a call whose result is a `returns`; the handles have no types of their own."""
    response = method.remote(*arguments)
    try:
        result: T = await response
    except asyncio.CancelledError as error:
        # Ray raises it too where the callee's task was cancelled (2.60).
        if not own_cancellation():
            raise _given_up(hop) from error
        response.cancel()
        raise
    except Exception as error:
        raise _translated(hop, error) from error
    return result


async def _stream(hop: str, method: Any, request: Any) -> AsyncGenerator[Any, None]:
    response = method.remote(request)
    finished = False
    try:
        async for item in response:
            yield item
        finished = True
    except asyncio.CancelledError as error:
        if not own_cancellation():
            finished = True
            raise _given_up(hop) from error
        raise
    except Exception as error:
        finished = True
        raise _translated(hop, error) from error
    finally:
        # Left early: by a cancelled task, or by a consumer that has what it wanted.
        if not finished:
            response.cancel()


def _given_up(hop: str) -> RequestError:
    if hop == "engine":
        return EngineDied("The engine's replica gave this request up.")
    return HopUnavailable(f"The {hop} replica gave this request up.", hop, _RETRY_AFTER_S)


def _translated(hop: str, error: Exception) -> BaseException:
    """Ray's exception as one of our tree where it means something to a client; others as they are."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, RequestError) else error
    if isinstance(error, BackPressureError):
        return Overloaded(f"{hop}.max_queued_requests: too many requests wait already.", hop, _RETRY_AFTER_S)
    if isinstance(error, RayActorError):
        if hop == "engine":
            return EngineDied("The engine's replica was lost while it worked on this request.")
        return HopUnavailable(f"A {hop} replica was lost while it worked on this request.", hop, _RETRY_AFTER_S)
    if isinstance(error, DeploymentUnavailableError | ReplicaUnavailableError):
        return HopUnavailable(f"No {hop} replica can take the request now.", hop, _RETRY_AFTER_S)
    if isinstance(error, TaskCancelledError):
        return _given_up(hop)
    return error
