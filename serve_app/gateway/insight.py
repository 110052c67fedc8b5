"""`GET /insight`: the page, its data, and the latest requests. All need the admin key where one is configured.

The page asks for nothing from outside and may load nothing from there.
"""

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from serve_app.aio import within
from serve_app.errors import InvalidRequest
from serve_app.gateway.auth import Authenticator
from serve_app.insight.page import page
from serve_app.insight.service import InsightClient

_TIMEOUT_S = 10.0
_MAX_LAST = 10_000
_DEFAULT_LAST = 200
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class InsightRoutes:
    """One method per route. Each raises RequestError."""

    def __init__(self, insight: InsightClient, authenticator: Authenticator) -> None:
        self._insight = insight
        self._authenticator = authenticator

    async def page(self, request: Request) -> Response:
        """The HTML page."""
        self._authenticator.require_admin(request.headers)
        return Response(page(), media_type="text/html; charset=utf-8", headers=_HEADERS)

    async def data(self, request: Request) -> Response:
        """What the page shows, as JSON."""
        self._authenticator.require_admin(request.headers)
        view = await within(time.time() + _TIMEOUT_S, self._insight.view())
        return Response(view, media_type="application/json", headers=_HEADERS)

    async def requests(self, request: Request) -> Response:
        """`last` requests, or those with an `id` (the request's or the trace's), oldest first, as JSON."""
        self._authenticator.require_admin(request.headers)
        for name in request.query_params:
            if name not in ("last", "id"):
                raise InvalidRequest(f"{name[:50]}: unknown; give last or id.", name[:50])
        wanted = self._insight.requests(_last(request.query_params.get("last")), request.query_params.get("id"))
        found = await within(time.time() + _TIMEOUT_S, wanted)
        return Response(msgspec.json.encode(found), media_type="application/json", headers=_HEADERS)


def _last(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LAST
    # Python refuses to read numbers of thousands of digits.
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= _MAX_LAST):
        raise InvalidRequest(f"last: expected a whole number from 1 to {_MAX_LAST}.", "last")
    return int(text)
