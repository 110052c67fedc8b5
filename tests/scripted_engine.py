"""An engine that plays scripts, and readers of what the postprocessor makes of them."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from streams import pushing

from serve_app.config import TracingSection
from serve_app.messages import Closing, EngineDelta, EngineRequest, LoadReport, PathReport
from serve_app.telemetry.tracing import start

UNTRACED = start(TracingSection(), "postprocess", "test", "m")
ENDLESS = [EngineDelta((97,)) for _ in range(10_000)]
REPORT = PathReport(LoadReport(running=1, waiting=2, kv_usage=0.5, kv_blocks=10), {"engine": 3})


class ScriptedEngine:
    """Plays one script per request, in the order of the requests' numbers; the last one for all that follow.

    In a script an exception is raised, a number is a pause in seconds, and None waits for ever.
    """

    def __init__(self, *scripts: list[Any]) -> None:
        self._scripts = scripts
        self.requests: list[EngineRequest] = []
        self.given: list[int] = []
        self.closed: list[bool] = []

    @pushing
    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        number = len(self.requests)
        self.requests.append(request)
        self.given.append(0)
        self.closed.append(False)
        try:
            for step in self._scripts[min(number, len(self._scripts) - 1)]:
                if step is None:
                    await asyncio.Event().wait()
                elif isinstance(step, int | float):
                    await asyncio.sleep(step)
                elif isinstance(step, Exception):
                    raise step
                else:
                    self.given[number] += len(step.token_ids)
                    yield step
                    await asyncio.sleep(0)
        finally:
            self.closed[number] = True

    async def report(self) -> PathReport:
        return REPORT


def bytes_of(item: bytes | Closing) -> bytes:
    """What the client gets of an item."""
    return item.data if isinstance(item, Closing) else item


def said(text: str, reason: Any = "stop", size: int = 1, **last: Any) -> list[EngineDelta]:
    """The text byte by byte, or in larger deltas, then the end-of-sequence token."""
    raw = text.encode()
    deltas = [EngineDelta(tuple(raw[at : at + size])) for at in range(0, len(raw), size)]
    return [*deltas, EngineDelta((256,), reason, ends_with_stop_token=True, **last)]


def events_of(chunks: list[bytes]) -> list[Any]:
    """The JSON of a whole SSE response, which must end in `[DONE]`."""
    *events, done, rest = b"".join(chunks).split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]


def streamed(chunks: list[bytes]) -> dict[int, tuple[str, str]]:
    """Text and finish reason of each choice; a choice must say its finish reason once, with its last chunk."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for event in events_of(chunks):
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in reasons
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[index] = texts.get(index, "") + text
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"]
    return {index: (texts[index], reasons[index]) for index in sorted(texts)}


def whole(chunks: list[bytes]) -> dict[int, tuple[str, str]]:
    """As `streamed`, of one JSON body, whose choices must stand in the order of their numbers."""
    (body,) = chunks
    choices = msgspec.json.decode(body)["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return {
        choice["index"]: (
            choice["text"] if "text" in choice else choice["message"]["content"],
            choice["finish_reason"],
        )
        for choice in choices
    }
