"""Asks a running service for the requests that it remembers. Knows nothing of what they mean."""

import http.client
import os
import urllib.error
import urllib.parse
import urllib.request
from email.message import Message
from pathlib import Path
from typing import IO

import msgspec

from serve_app.errors import ConfigError, TokenlineError
from serve_app.messages import RequestMetrics

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "TOKENLINE_ADMIN_KEY"
_PATH = "/insight/requests"
_TIMEOUT_S = 10.0
_REASON_BYTES = 64 << 10


class _Reason(msgspec.Struct):
    message: str


class _Refused(msgspec.Struct):
    """The body of an error, as far as it is read here."""

    error: _Reason


class FetchFailed(TokenlineError):
    """The service did not give the requests; the message says why."""


def admin_key(file: Path | None) -> str | None:
    """The key of the file, else of the environment; None if neither has one. Raises ConfigError, OSError."""
    try:
        text = os.environ.get(KEY_VARIABLE, "") if file is None else file.read_text("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not a key: it has more than ASCII characters") from None
    text = text.strip()
    if not (text.isascii() and all(map(str.isprintable, text))):
        raise ConfigError(f"{file or KEY_VARIABLE}: not a key: it has more than printable ASCII characters")
    if not text and file is not None:
        raise ConfigError(f"{file}: not a key: it is empty")
    return text or None


def latest(url: str, key: str | None, count: int) -> tuple[RequestMetrics, ...]:
    """The last `count` requests that ended; none is no error. Raises FetchFailed, ConfigError."""
    return _requests(url, key, {"last": str(count)})


def with_id(url: str, key: str | None, request_id: str) -> tuple[RequestMetrics, ...]:
    """All requests of this id, which is a request's or a trace's. Raises FetchFailed (also for none), ConfigError."""
    found = _requests(url, key, {"id": request_id})
    if not found:
        remembered = "is remembered (insight.window_s and insight.max_requests limit it)"
        raise FetchFailed(f"no request with the id {request_id!r} {remembered}")
    return found


def _requests(url: str, key: str | None, query: dict[str, str]) -> tuple[RequestMetrics, ...]:
    data = _get(_address(url), key, query)
    try:
        return msgspec.json.decode(data, type=tuple[RequestMetrics, ...])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FetchFailed(f"{url} answers {_PATH} with something else than requests: {error}") from None


def _get(url: str, key: str | None, query: dict[str, str]) -> bytes:
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{url}{_PATH}?{urllib.parse.urlencode(query)}", headers=headers)
    try:
        with _opener().open(request, timeout=_TIMEOUT_S) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise FetchFailed(_refusal(url, error, key)) from None
    except TimeoutError:
        raise FetchFailed(f"{url} does not answer within {_TIMEOUT_S:.0f} s") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, TimeoutError):
            raise FetchFailed(f"{url} does not answer within {_TIMEOUT_S:.0f} s") from None
        raise FetchFailed(f"nothing serves at {url}: {reason}") from None


def _refusal(url: str, error: urllib.error.HTTPError, key: str | None) -> str:
    """A status that is not 200, as a sentence."""
    if error.code in (401, 403):
        wants = "another key than the one given" if key else "a key"
        return f"{url} wants {wants} ({error.code}): give --key-file or set {KEY_VARIABLE}"
    try:
        reason = msgspec.json.decode(error.read(_REASON_BYTES), type=_Refused).error
    except (msgspec.DecodeError, OSError, http.client.HTTPException):
        return f"{url} answers {_PATH} with status {error.code}: is it Tokenline?"
    return f"{url} answers {_PATH} with status {error.code}: {reason.message}"


def _address(url: str) -> str:
    """The url without a slash at its end. Raises ConfigError."""
    try:
        split = urllib.parse.urlsplit(url)
        well_formed = split.scheme in ("http", "https") and bool(split.hostname) and split.port != 0
    except ValueError:
        well_formed = False
    if not well_formed or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"--url {url!r}: not an http or https address")
    return url.rstrip("/")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """urllib would send the key along to wherever a redirect leads."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


def _opener() -> urllib.request.OpenerDirector:
    """Straight to the service: an environment's HTTP proxy is for the internet."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())
