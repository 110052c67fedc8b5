"""Request bytes to a typed body, or an error that names the field.

msgspec decodes and checks in one pass and is strict: no NaN, no lone surrogate, no text that is not UTF-8. Where a body
is no JSON at all, a second and slower look finds the field that spoils it.
"""

import json
import math
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

import msgspec

from serve_app.complaint import join, read
from serve_app.errors import InvalidRequest, UnsupportedField
from serve_app.gateway.schema import Body

B = TypeVar("B", bound=Body)

# The most of a field's name, and of what is wrong with it, that an error repeats, in characters.
_NAME_LIMIT = 200
_REASON_LIMIT = 1000


def decode(raw: bytes, body_type: type[B]) -> B:
    """The body, every field checked for itself. Raises InvalidRequest or UnsupportedField."""
    try:
        body: B = _decoder(body_type).decode(raw)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except RecursionError:
        raise InvalidRequest("body: nested too deeply.", "body") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _diagnose(raw) from None
    return body


@cache
def _decoder(body_type: type[B]) -> msgspec.json.Decoder[B]:
    return msgspec.json.Decoder(body_type)


def _explain(sentence: str) -> InvalidRequest:
    complaint = read(sentence)
    name = complaint.field[:_NAME_LIMIT] or "body"
    if complaint.unknown:
        return UnsupportedField(f"{name}: unknown field; this server does not know what to do with it.", name)
    if complaint.missing:
        return InvalidRequest(f"{name}: required, and missing.", name)
    return InvalidRequest(f"{name}: {complaint.reason[:_REASON_LIMIT]}.", name)


def _diagnose(raw: bytes) -> InvalidRequest:
    """Why a body that msgspec could not read is none."""
    if not raw.strip():
        return InvalidRequest("body: empty; a JSON object is expected.", "body")
    try:
        value = json.loads(raw.decode("utf-8", "surrogateescape"))
    except RecursionError:
        return InvalidRequest("body: nested too deeply.", "body")
    except json.JSONDecodeError as error:
        return InvalidRequest(
            f"body: not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}.", "body"
        )
    except ValueError:  # Python's own limit on the digits of a number
        return InvalidRequest("body: a number has too many digits.", "body")
    for path, leaf in _leaves(value):
        name = path[:_NAME_LIMIT].encode("utf-8", "replace").decode() or "body"
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return InvalidRequest(f"{name}: NaN and infinite numbers are not JSON.", name)
        if isinstance(leaf, str) and any("\ud800" <= character <= "\udfff" for character in leaf):
            return InvalidRequest(f"{name}: not valid Unicode (a lone surrogate, or bytes that are not UTF-8).", name)
    return InvalidRequest("body: not valid JSON.", "body")


def _leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key, text and number with its path. Without recursion: the value may be deep."""
    stack: list[tuple[str, Any]] = [("", value)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, dict):
            for key, child in reversed(item.items()):
                stack.append((join(path, key), child))
                stack.append((join(path, key), key))
        elif isinstance(item, list):
            stack.extend((f"{path}[{index}]", child) for index, child in reversed(list(enumerate(item))))
        else:
            yield path, item
