"""Every request's id: the client's if it is sane, else ours; on every response, whatever made it."""

import re
import uuid
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"

_SANE = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")


class RequestIdMiddleware:
    """Pure ASGI: puts the id into the scope and onto the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own = scope["tokenline.request_id"] = _choose(scope["headers"])

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = own
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id(scope: Scope) -> str:
    """The id of the request that this scope belongs to."""
    own: str = scope["tokenline.request_id"]
    return own


def _choose(headers: Any) -> str:
    for name, value in headers:
        if name == HEADER.encode() and _SANE.fullmatch(value):
            return str(value, "ascii")
    return uuid.uuid4().hex
