"""Observes every request of the API from its first byte to its last: the server span, its account, its log line.

Pure ASGI, around the routes: what is written here is the last thing that can be measured of a request.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.errors import as_request_error
from serve_app.gateway.attributes import request_attributes, response_attributes
from serve_app.gateway.recording import Recording
from serve_app.gateway.request_id import request_id
from serve_app.insight.service import InsightClient
from serve_app.messages import Operation, RequestMetrics
from serve_app.telemetry.account import Account, account
from serve_app.telemetry.logs import bind
from serve_app.telemetry.names import GATEWAY
from serve_app.telemetry.outbox import Outbox
from serve_app.telemetry.tracing import HopSpan, Tracing

logger = logging.getLogger(__name__)

OPERATIONS: Mapping[str, Operation] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}


@dataclass(frozen=True)
class Telemetry:
    """Where the gateway's observations go, and who remembers them."""

    tracing: Tracing
    outbox: Outbox
    insight: InsightClient


class ObserveMiddleware:
    """`in_flight` is the number of requests between their first and last byte now."""

    def __init__(self, app: ASGIApp, model: str, telemetry: Telemetry) -> None:
        self._app = app
        self._model = model
        self._telemetry = telemetry
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = OPERATIONS.get(_path(scope)) if scope["type"] == "http" and scope["method"] == "POST" else None
        if operation is None:
            await self._app(scope, receive, send)
            return
        recording = Recording(request_id(scope), operation, self._model, time.time())
        traceparents = Headers(scope=scope).getlist("traceparent")
        span = self._telemetry.tracing.begin(
            GATEWAY,
            traceparent=traceparents[0] if len(traceparents) == 1 else None,
            begin_s=recording.arrived_s,
            root=True,
        )
        scope["tokenline.recording"], scope["tokenline.span"] = recording, span
        bind(recording.request_id, span.trace_id)
        self.in_flight += 1
        try:
            await self._app(scope, receive, _observed(send, recording, span))
        except asyncio.CancelledError:
            recording.leave()  # the server gave the call up: nobody waits for its answer
            raise
        except Exception as error:
            recording.fail(as_request_error(error, recording.request_id))
            raise
        finally:
            self.in_flight -= 1
            self._finish(recording, span)

    def _finish(self, recording: Recording, span: HopSpan) -> None:
        metrics = recording.metrics(span.trace_id, span.sampled)
        self._telemetry.outbox.add(metrics)
        numbers = account(metrics)
        if span.sampled:
            own = [one for one in metrics.stages if one.name.startswith(f"{GATEWAY}.")]
            span.stages(own)
            span.set(request_attributes(recording, self._telemetry.tracing.capture_content))
            span.set(response_attributes(recording, metrics, numbers))
        span.end(metrics.ended_s, error=metrics.error, failed=metrics.status >= 500)
        _log(metrics, numbers)


def recording_of(scope: Scope) -> Recording | None:
    """The recording of the request that this scope belongs to; None on routes that are not observed."""
    recording: Recording | None = scope.get("tokenline.recording")
    return recording


def span_of(scope: Scope) -> HopSpan | None:
    """The server span of the request that this scope belongs to; None on routes that are not observed."""
    span: HopSpan | None = scope.get("tokenline.span")
    return span


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _observed(send: Send, recording: Recording, span: HopSpan) -> Send:
    """Times what is written, and adds the headers that only the observer knows."""

    async def observed_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            recording.status = message["status"]
            headers = MutableHeaders(scope=message)
            if span.traceparent is not None:
                headers["traceparent"] = span.traceparent
            if recording.include_timings and not (recording.inbound and recording.inbound.stream):
                headers["server-timing"] = recording.server_timing()
        begin_s = time.time()
        await send(message)
        if message.get("body"):
            recording.wrote(begin_s, time.time())

    return observed_send


def _log(metrics: RequestMetrics, numbers: Account) -> None:
    fields: dict[str, Any] = {
        "operation": metrics.operation,
        "stream": metrics.stream,
        "status": metrics.status,
        "outcome": metrics.outcome,
        "error_code": metrics.error,
        "prompt_tokens": metrics.prompt_tokens,
        "completion_tokens": metrics.completion_tokens,
        "ttft_s": numbers.ttft_s,
        "e2e_s": numbers.e2e_s,
        "unaccounted_s": numbers.unaccounted_s,
    }
    logger.info("request", extra={"fields": fields})
