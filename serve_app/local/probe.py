"""Owns the two questions put to a service that has just started: is it ready, and what does it answer to one chat?

Knows nothing of how it was started.
"""

import http.client
import json
import shlex
from typing import Any
from urllib.parse import urlsplit

from serve_app.errors import TokenlineError

QUESTION = "What is the capital of France?"
_READY_TIMEOUT_S = 5.0
_CHAT_TIMEOUT_S = 120.0


class ProbeFailed(TokenlineError):
    """The service answered the sample chat with something other than an answer."""


def is_ready(url: str) -> bool:
    """Whether `GET /ready` answers 200 now; false while nothing listens yet."""
    try:
        status, _ = _request(url, "GET", "/ready", None, _READY_TIMEOUT_S)
    except (OSError, http.client.HTTPException):
        return False
    return status == 200


def sample_chat(url: str, model: str) -> str:
    """The model's answer to one question. Raises ProbeFailed with what came instead."""
    try:
        status, body = _request(url, "POST", "/v1/chat/completions", sample_body(model), _CHAT_TIMEOUT_S)
    except (OSError, http.client.HTTPException) as error:
        raise ProbeFailed(f"the sample chat got no answer: {error!r}") from error
    try:
        return str(json.loads(body)["choices"][0]["message"]["content"]).strip()
    except (ValueError, LookupError, TypeError) as error:
        text = body.decode("utf-8", "replace")[:500]
        raise ProbeFailed(f"the sample chat got status {status}: {text}") from error


def sample_body(model: str) -> dict[str, Any]:
    """The sample chat's request."""
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 32}


def curl_line(url: str, model: str) -> str:
    """The sample chat as a command for a shell."""
    body = shlex.quote(json.dumps(sample_body(model)))
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {body}"


def _request(url: str, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> tuple[int, bytes]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
    try:
        headers = {"Content-Type": "application/json"} if body else {}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
