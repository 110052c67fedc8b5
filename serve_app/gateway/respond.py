"""Responses: one that streams and notices its client leave, and the one place where an error becomes HTTP.

Before the first byte an error is a JSON body with its status; after it, one SSE event and the end of the stream. Pure
ASGI, because Starlette's streaming response learns of a client's departure only when it sends, which a waiting one does
not.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.errors import (
    DeadlineExceeded,
    InternalError,
    RequestError,
    Unauthorized,
    as_request_error,
    body,
    sse_event,
)
from serve_app.gateway.recording import Recording
from serve_app.messages import RequestContext

logger = logging.getLogger(__name__)

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Tells nginx and what descends from it not to collect the stream.
    (b"x-accel-buffering", b"no"),
]


# Time past the deadline in which a client can still be told that it passed.
_LAST_WORD_S = 2.0


def error_response(error: RequestError) -> Response:
    """The error as an HTTP response, with `Retry-After` where a retry helps and the time is known."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = 'Basic realm="tokenline", charset="UTF-8"'
    return Response(body(error), error.status, headers, media_type="application/json")


def with_timings(data: bytes, timings: dict[str, Any]) -> bytes:
    """The timings as a last field of the JSON object that `data`, a body or SSE events, ends with."""
    head, brace, tail = data.rpartition(b"}")
    return head + b',"timings":' + msgspec.json.encode(timings) + brace + tail


def translate(error: BaseException, request_id: str) -> RequestError:
    """Any exception as one of the tree; those from outside it are logged here, and told to no client."""
    known = as_request_error(error, request_id)
    if isinstance(known, InternalError):
        logger.error("request %s failed", request_id, exc_info=error)
    return known


class GeneratedResponse:
    """An ASGI response over ready bytes: SSE events, or a single JSON body.

    It races the stream with the client's departure; when the client is gone the stream is closed, which cancels the
    request in every hop.
    """

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], sse: bool, context: RequestContext, recording: Recording
    ) -> None:
        self._chunks = chunks
        self._sse = sse
        self._context = context
        self._recording = recording
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(scope, receive, send))
        gone = asyncio.ensure_future(_client_gone(receive))
        try:
            # The stream keeps the deadline itself; this bound is for a client that stays and does not read.
            limit_s = max(0.0, self._context.remaining_s()) + _LAST_WORD_S
            await asyncio.wait((writing, gone), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Also when the server cancels this call: nothing may go on working for a request that has ended.
            for task in (writing, gone):
                task.cancel()
            left = gone.done()
            if left:
                self._recording.leave()
            results = await asyncio.gather(writing, gone, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]
        if not left and isinstance(results[0], asyncio.CancelledError):
            # The stream did not keep its deadline, or the client did not read it.
            late = DeadlineExceeded("The request's deadline passed.")
            self._recording.fail(late)
            if not self._started:
                await error_response(late)(scope, receive, send)

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    if not self._started:
                        self._started = True
                        await send(self._start(chunk))
                    await send({"type": "http.response.body", "body": chunk, "more_body": self._sse})
        except Exception as error:  # noqa: BLE001 - the translation: nothing may pass it untold
            known = translate(error, self._context.request_id)
            self._recording.fail(known)
            if not self._started:
                await error_response(known)(scope, receive, send)
                return
            if self._sse and not self._recording.whole:
                await send({"type": "http.response.body", "body": sse_event(known), "more_body": True})
        if self._sse:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _start(self, chunk: bytes) -> dict[str, object]:
        headers = _SSE_HEADERS
        if not self._sse:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(chunk)).encode())]
        return {"type": "http.response.start", "status": 200, "headers": headers}


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
