"""What may stand on a span: attributes and times in the form that the exporter can encode, whatever comes."""

import time
from collections.abc import Mapping
from typing import Any

from serve_app.messages import Stage

Attributes = Mapping[str, Any]

_INT64 = range(-(1 << 63), 1 << 63)


def clean(attributes: Attributes) -> dict[str, Any]:
    """Without those that are None; an integer that OTLP has no room for becomes text."""
    return {name: _value(value) for name, value in attributes.items() if value is not None}


def text(text: str) -> str:
    """Half a surrogate pair is no UTF-8, and would cost the whole batch that the span is in."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def nanoseconds(seconds: float | None) -> int | None:
    """Of the wall clock; None, which is now, also for what is no moment (a NaN)."""
    return int(seconds * 1e9) if seconds is not None and 0 <= seconds < 1e10 else None


def not_before(begin_ns: int | None, end_ns: int | None) -> int:
    """`end_ns`, or now. Clocks step back; a span does not."""
    return max(begin_ns or 0, time.time_ns() if end_ns is None else end_ns)


def summed(stage: Stage) -> Attributes:
    """What the length of summed work does not show."""
    if stage.count <= 1 and not stage.pieces:
        return {}
    return {
        "tokenline.count": stage.count,
        "tokenline.longest_s": stage.longest_s,
        "tokenline.extent_s": stage.end_s - stage.begin_s,
    }


def _value(value: Any) -> Any:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, int):
        return value if value in _INT64 else str(value)
    if isinstance(value, list | tuple):
        return [_value(one) for one in value]
    return value
