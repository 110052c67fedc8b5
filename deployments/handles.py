"""Typed clients over Ray Serve handles: what the library sees of the other hops.

Here and nowhere else Ray's exceptions become ours, and a cancelled caller cancels its callee. A handle's method is
looked up once: each look-up makes a new handle with a router of its own (Ray Serve 2.60).
"""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.streams import Asking, answered
from serve_app.aio import Enough, Sink, own_cancellation
from serve_app.channel.frame import Codec
from serve_app.config import ChannelSection
from serve_app.errors import ChannelLost, EngineDied, HopUnavailable, Overloaded, RequestError
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

# What comes back through the channel.
GENERATED: Codec[bytes | Closing] = Codec(bytes | Closing)
ENGINE_DELTAS: Codec[EngineDelta] = Codec(EngineDelta)

# Seconds after which a caller is advised to retry a refusal whose end cannot be computed.
_RETRY_AFTER_S = 1.0


class TokenizerHandle:
    """See `TokenizerClient` in `serve_app/path.py`."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        handle = quick(handle)
        self._tokenize = handle.tokenize
        self._detokenize = handle.detokenize

    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        return await _unary("tokenizer", Tokenized, self._tokenize, request)

    async def detokenize(self, context: RequestContext, ids: TokenIds) -> Detokenized:
        return await _unary("tokenizer", Detokenized, self._detokenize, context, ids)


class PostprocessHandle:
    """See `PostprocessClient` in `serve_app/path.py`."""

    def __init__(self, handle: DeploymentHandle[Any], channel: ChannelSection) -> None:
        handle = quick(handle)
        self._asking: Asking[GenerateRequest, bytes | Closing] = Asking(handle, GENERATED, channel)
        self._report = handle.report

    async def generate(self, request: GenerateRequest, sink: Sink[bytes | Closing]) -> None:
        await _translating("postprocess", self._asking.generate(request, sink))

    async def report(self) -> PathReport:
        return await _unary("postprocess", PathReport, self._report)

    def stop(self) -> None:
        self._asking.stop()


class EngineHandle:
    """See `EngineClient` in `serve_app/postprocess/service.py`."""

    def __init__(self, handle: DeploymentHandle[Any], channel: ChannelSection) -> None:
        handle = quick(handle)
        self._asking: Asking[EngineRequest, EngineDelta] = Asking(handle, ENGINE_DELTAS, channel)
        self._report = handle.report

    async def generate(self, request: EngineRequest, sink: Sink[EngineDelta]) -> None:
        await _translating("engine", self._asking.generate(request, sink))

    async def report(self) -> PathReport:
        return await _unary("engine", PathReport, self._report)

    def stop(self) -> None:
        self._asking.stop()


class InsightHandle:
    """See `InsightClient` in `serve_app/insight/service.py`."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        handle = quick(handle)
        self._report = handle.report
        self._view = handle.view
        self._requests = handle.requests

    async def report(self, report: HopReport) -> None:
        await _unary("insight", type(None), self._report, report)

    async def view(self) -> bytes:
        return await _unary("insight", bytes, self._view)

    async def requests(self, last: int | None, request_id: str | None) -> tuple[RequestMetrics, ...]:
        return await _unary("insight", tuple[RequestMetrics, ...], self._requests, last, request_id)


def quick(handle: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    """The handle with the standard library's pickle, which our messages need no more than; Ray's takes three times as
    long."""
    return handle.options(request_serialization="pickle", response_serialization="pickle")


async def _unary(hop: str, returns: type[T], method: Any, *arguments: Any) -> T:
    """Awaits a call whose result is a `returns`; the handles have no types of their own."""
    result: T = await _translating(hop, answered(method.remote(*arguments)))
    return result


async def _translating(hop: str, work: Awaitable[T]) -> T:
    """The work's result, or one of our errors in place of Ray's and the channel's."""
    try:
        return await work
    except asyncio.CancelledError as error:
        # Ray raises it too where the callee's task was cancelled (2.60).
        if own_cancellation():
            raise
        raise _given_up(hop) from error
    except Enough:
        raise
    except Exception as error:
        raise _translated(hop, error) from error


def _given_up(hop: str) -> RequestError:
    if hop == "engine":
        return EngineDied("The engine's replica gave this request up.")
    return HopUnavailable(f"The {hop} replica gave this request up.", hop, _RETRY_AFTER_S)


def _translated(hop: str, error: Exception) -> BaseException:
    """Ray's exception as one of our tree where it means something to a client; others as they are."""
    if isinstance(error, RayTaskError):  # of its cause's class too, but that is Ray's own object
        cause: Exception = error.cause
        return _translated(hop, cause) if isinstance(cause, RequestError | ChannelLost) else error
    if isinstance(error, RequestError):
        return error
    if isinstance(error, BackPressureError):
        return Overloaded(f"{hop}.max_queued_requests: too many requests wait already.", hop, _RETRY_AFTER_S)
    if isinstance(error, RayActorError | ChannelLost):
        if hop == "engine":
            return EngineDied("The engine's replica was lost while it worked on this request.")
        return HopUnavailable(f"A {hop} replica was lost while it worked on this request.", hop, _RETRY_AFTER_S)
    if isinstance(error, DeploymentUnavailableError | ReplicaUnavailableError):
        return HopUnavailable(f"No {hop} replica can take the request now.", hop, _RETRY_AFTER_S)
    if isinstance(error, TaskCancelledError):
        return _given_up(hop)
    return error
