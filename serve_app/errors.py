"""The error tree: every way a request or the configuration can fail, with its HTTP status and OpenAI code.

    TokenlineError
    ├── ConfigError                    the operator's mistake; never reaches a client
    ├── ChannelLost                    a stream between two replicas broke; the hop's handle says what that means
    └── RequestError                   reaches the client through `body` and `sse_event` below, and nowhere else
        ├── InvalidRequest        400  a field is wrong; `param` names it
        │   ├── UnsupportedField  400  a field this server does not serve, refused rather than ignored
        │   └── ContextTooLong    400  prompt plus max_tokens do not fit the model's context
        ├── Unauthorized          401  the key is missing or wrong
        ├── ModelNotFound         404
        ├── RouteNotFound         404
        ├── MethodNotAllowed      405
        ├── BodyTimeout           408  the client did not deliver its request in time
        ├── BodyTooLarge          413
        ├── Overloaded            429  refused before any work; try again later
        ├── NotReady              503  the path has not answered its warm-up yet
        ├── EngineDied            503  the engine or its replica was lost mid-request
        │   └── OutOfMemory       503  because it had no memory left
        ├── BacklogFull           503  what a client or a hop does not read has grown past its limit
        ├── HopUnavailable        503  a hop has no replica that can take the request
        ├── DeadlineExceeded      504  the request's deadline passed, wherever it was
        └── InternalError         500  everything outside this tree; says nothing but the request's id

Errors are raised, cross the hops by pickle, and are turned into a response in one place
(`serve_app/gateway/respond.py`). This module knows nothing of HTTP libraries, Ray or vLLM.
"""

from typing import Any, ClassVar

import msgspec


class TokenlineError(Exception):
    """Root of everything this project raises on purpose."""


class ConfigError(TokenlineError):
    """The configuration or the machine cannot serve; the message is one sentence that names the key or the limit."""


class ChannelLost(TokenlineError):
    """A stream of the token channel broke: the replica at its other end is lost, or items of it are."""


class RequestError(TokenlineError):
    """A request failed in a way that its client may be told.

    `param` is the request field (or limit) at fault, in the path notation of the request: `messages[0].content`.
    """

    status: ClassVar[int]
    type: ClassVar[str]
    code: ClassVar[str]
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception pickles by args alone and would lose the two other fields on the way through Ray.
        return type(self), (self.message, self.param, self.retry_after_s)


class InvalidRequest(RequestError):
    """A field has the wrong type, is out of bounds, or contradicts another."""

    status, type, code = 400, "invalid_request_error", "invalid_value"


class UnsupportedField(InvalidRequest):
    """A field that is unknown, or known and not served here."""

    code = "unsupported_parameter"


class ContextTooLong(InvalidRequest):
    """Prompt plus max_tokens exceed the model's context; the message has both counts."""

    code = "context_length_exceeded"


class Unauthorized(RequestError):
    """What was asked for needs a key, which is missing or wrong."""

    status, type, code = 401, "authentication_error", "invalid_api_key"


class ModelNotFound(RequestError):
    """The request names a model that is not served here."""

    status, type, code = 404, "invalid_request_error", "model_not_found"


class RouteNotFound(RequestError):
    """No route has this path."""

    status, type, code = 404, "invalid_request_error", "not_found"


class MethodNotAllowed(RequestError):
    """The path exists, for another method."""

    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class BodyTimeout(RequestError):
    """The client did not send its whole body within `gateway.body_timeout_s`."""

    status, type, code, retryable = 408, "invalid_request_error", "body_timeout", True


class BodyTooLarge(RequestError):
    """The body is over `gateway.max_body_bytes`."""

    status, type, code = 413, "invalid_request_error", "body_too_large"


class Overloaded(RequestError):
    """Refused before any work, because a queue is full."""

    status, type, code, retryable = 429, "rate_limit_error", "overloaded", True


class NotReady(RequestError):
    """The whole path has not yet answered a warm-up request."""

    status, type, code, retryable = 503, "service_unavailable_error", "not_ready", True


class EngineDied(RequestError):
    """The engine, or the replica that holds it, was lost while the request ran."""

    status, type, code, retryable = 503, "service_unavailable_error", "engine_died", True


class OutOfMemory(EngineDied):
    """The engine failed on the request for want of memory."""

    code = "out_of_memory"


class BacklogFull(RequestError):
    """The request's answer is made faster than it is read, and `channel.max_backlog_items` of it wait."""

    status, type, code, retryable = 503, "service_unavailable_error", "backlog_full", True

    @classmethod
    def of(cls, items: int) -> "BacklogFull":
        """With so many pieces waiting, which is the limit."""
        limit = "channel.max_backlog_items"
        return cls(f"The answer is not read: {items} pieces of it wait, the most that {limit} allows.", limit)


class HopUnavailable(RequestError):
    """A deployment on the path has no replica that can take the request."""

    status, type, code, retryable = 503, "service_unavailable_error", "unavailable", True


class DeadlineExceeded(RequestError):
    """The request's deadline passed before it was done."""

    status, type, code, retryable = 504, "timeout_error", "deadline_exceeded", True


class InternalError(RequestError):
    """Stands in for anything outside the tree, whose details stay in our log."""

    status, type, code = 500, "server_error", "internal_error"


def as_request_error(error: BaseException, request_id: str) -> RequestError:
    """The one translation: errors of the tree as they are, anything else as an `InternalError`."""
    if isinstance(error, RequestError) and not isinstance(error, InternalError):
        return error
    return InternalError(f"The server failed on this request. Its id is {request_id}.")


def body(error: RequestError) -> bytes:
    """The error as a JSON body in the OpenAI format."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})


def sse_event(error: RequestError) -> bytes:
    """The error as one SSE event, for a response whose first byte has gone; the official client raises on it."""
    return b"event: error\ndata: " + body(error) + b"\n\n"
