"""Request bytes to a typed body, or an error that names the field.

msgspec decodes and checks in one pass and is strict: no NaN, no lone surrogate, no text that is not UTF-8. Where a body
is no JSON at all, a second and slower look finds the field that spoils it.
"""

import codecs
import difflib
import json
import math
import re
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

_SURROGATE = re.compile("[\ud800-\udfff]")


class Malformed(Exception):
    """The bytes are no JSON that may be read."""


def decode(raw: bytes, body_type: type[B]) -> B:
    """The body, every field checked for itself. Raises InvalidRequest, UnsupportedField or Malformed."""
    try:
        body: B = _decoder(body_type).decode(raw)
    except msgspec.ValidationError as error:
        raise _explain(str(error), body_type) from None
    except RecursionError:
        raise InvalidRequest("body: nested too deeply.", "body") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Malformed from None
    return body


@cache
def _decoder(body_type: type[B]) -> msgspec.json.Decoder[B]:
    return msgspec.json.Decoder(body_type)


def _explain(sentence: str, body_type: type[Body]) -> InvalidRequest:
    complaint = read(sentence)
    name = complaint.field[:_NAME_LIMIT] or "body"
    if complaint.unknown:
        known = [] if complaint.section else [field.name for field in msgspec.structs.fields(body_type)]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "nothing is ignored in silence here."
        return UnsupportedField(f"{name}: unknown field; {hint}", name)
    if complaint.missing:
        return InvalidRequest(f"{name}: required, and missing.", name)
    return InvalidRequest(f"{name}: {complaint.reason[:_REASON_LIMIT]}.", name)


def diagnose(raw: bytes) -> InvalidRequest:
    """Why a body that msgspec could not read is none, and which field spoils it. Slow if large: use a thread."""
    if not raw.strip():
        return InvalidRequest("body: empty; a JSON object is expected.", "body")
    if raw.startswith(codecs.BOM_UTF8):
        return InvalidRequest("body: begins with a byte order mark; plain UTF-8 is expected.", "body")
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
    if (spoilt := _first_spoilt(value)) is None:
        return InvalidRequest("body: not valid JSON.", "body")
    steps, leaf = spoilt
    name = _path(steps)
    if isinstance(leaf, float):
        return InvalidRequest(f"{name}: NaN and infinite numbers are not JSON.", name)
    return InvalidRequest(f"{name}: not valid Unicode (a lone surrogate, or bytes that are not UTF-8).", name)


def _first_spoilt(value: Any) -> tuple[list[str | int], str | float] | None:
    """The first number that is not finite or text that is not Unicode, and the keys and indices that lead there.

    Walks with iterators, one step per level: neither depth nor length of the value costs more memory.
    """
    steps: list[str | int] = []
    levels: list[Iterator[tuple[str | int, Any]]] = [iter([("", value)])]
    while levels:
        for step, item in levels[-1]:
            if isinstance(step, str) and _has_surrogate(step):
                return [*steps[1:], step], step
            kind = type(item)
            if kind is dict or kind is list:
                steps.append(step)
                levels.append(iter(item.items()) if kind is dict else iter(enumerate(item)))
                break
            if (kind is float and not math.isfinite(item)) or (kind is str and _has_surrogate(item)):
                return [*steps[1:], step] if steps else [], item
        else:
            levels.pop()
            if steps:
                steps.pop()
    return None


def _has_surrogate(text: str) -> bool:
    return not text.isascii() and _SURROGATE.search(text) is not None


def _path(steps: list[str | int]) -> str:
    """In the notation `messages[0].content`, cut to a length that can be shown."""
    path = ""
    for step in steps:
        path = f"{path}[{step}]" if isinstance(step, int) else join(path, step[:_NAME_LIMIT])
        if len(path) > _NAME_LIMIT:
            break
    return path[:_NAME_LIMIT].encode("utf-8", "replace").decode() or "body"
