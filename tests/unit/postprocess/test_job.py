"""What a generation says of itself at its end, however that was."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from serve_app.config import TracingSection
from serve_app.errors import EngineDied
from serve_app.messages import (
    Closing,
    EngineDelta,
    EngineRequest,
    EngineTimes,
    GenerateRequest,
    GenerateSummary,
    PathReport,
    RequestContext,
    RequestKind,
    Sampling,
)
from serve_app.postprocess.service import PostprocessService
from serve_app.telemetry import names
from serve_app.telemetry.tracing import start
from serve_app.vocabulary import Vocabulary

UNTRACED = start(TracingSection(), "postprocess", "test", "m")


class TimedEngine:
    """Gives the bytes of a text one by one, with vLLM's four times on the first and the last delta."""

    def __init__(self, text: bytes, ends: bool = True, error: Exception | None = None) -> None:
        self._text, self._ends, self._error = text, ends, error

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        sent_s = request.context.sent_s
        assert sent_s is not None
        # As if the engine had been at it for seconds; the call is younger, so these times are another machine's.
        times = EngineTimes(sent_s + 0.001, sent_s + 0.002, sent_s + 0.003, sent_s + 0.004)
        for position, byte in enumerate(self._text):
            await asyncio.sleep(0.003)
            last = position == len(self._text) - 1
            yield EngineDelta((byte,), "length" if last and self._ends else None, times=None if position else times)
        if self._error is not None:
            raise self._error

    async def report(self) -> PathReport:
        raise NotImplementedError


@pytest.fixture
def ask() -> Any:
    def make(**fields: Any) -> GenerateRequest:
        now_s = time.time()
        context = RequestContext("r", now_s + 60, sent_s=now_s - 0.25)
        whole: dict[str, Any] = {
            "context": context,
            "kind": RequestKind.CHAT,
            "model": "m",
            "created_s": 1,
            "prompt_ids": ((1, 2, 3),),
            "max_tokens": (8,),
            "sampling": Sampling(),
        }
        return GenerateRequest(**(whole | fields))

    return make


async def items_of(service: PostprocessService, request: GenerateRequest) -> list[Any]:
    """All items; an error at the end stands behind them."""
    items: list[Any] = []
    try:
        async for item in service.generate(request):
            items.append(item)
    except Exception as error:  # noqa: BLE001
        items.append(error)
    return items


def summary_of(items: list[Any]) -> GenerateSummary:
    (closing,) = [item for item in items if isinstance(item, Closing)]
    return closing.summary


@pytest.mark.parametrize("stream", [True, False])
async def test_a_whole_answer_ends_with_its_summary(ask: Any, byte_vocabulary: Vocabulary, stream: bool) -> None:
    service = PostprocessService(byte_vocabulary, TimedEngine(b"hello"), UNTRACED)
    items = await items_of(service, ask(stream=stream))
    assert isinstance(items[-1], Closing)
    assert items[-1].data.endswith(b"data: [DONE]\n\n" if stream else b"}")
    summary = summary_of(items)
    assert (summary.prompt_tokens, summary.completion_tokens, summary.cached_tokens) == (3, 5, 0)
    stages = {one.name: one for one in summary.stages}
    assert set(stages) == {
        names.POSTPROCESS_QUEUE, names.ENGINE_QUEUE, names.PREFILL, names.DECODE, names.DETOKENIZE, names.RENDER,
    }  # fmt: skip
    assert stages[names.POSTPROCESS_QUEUE].busy_s >= 0.25
    assert stages[names.DETOKENIZE].count == 5
    assert stages[names.RENDER].count == (5 if stream else 1)
    (choice,) = summary.choices
    assert (choice.tokens, choice.finish_reason, choice.stop_string) == (5, "length", False)
    assert choice.first_token_s == stages[names.DECODE].begin_s < choice.last_token_s == stages[names.DECODE].end_s
    assert choice.longest_gap_s >= 0.003
    assert service.in_flight == 0


async def test_a_stop_string_is_told_apart(ask: Any, byte_vocabulary: Vocabulary) -> None:
    items = await items_of(
        PostprocessService(byte_vocabulary, TimedEngine(b"hello world"), UNTRACED), ask(stop=("lo",))
    )
    (choice,) = summary_of(items).choices
    assert (choice.tokens, choice.finish_reason, choice.stop_string) == (5, "stop", True)
    assert choice.last_token_s is not None


@pytest.mark.parametrize("stream", [True, False])
async def test_what_was_measured_comes_ahead_of_an_error(ask: Any, byte_vocabulary: Vocabulary, stream: bool) -> None:
    engine = TimedEngine(b"hel", ends=False, error=EngineDied("dead"))
    items = await items_of(PostprocessService(byte_vocabulary, engine, UNTRACED), ask(stream=stream))
    assert isinstance(items[-1], EngineDied)
    assert isinstance(items[-2], Closing)
    assert items[-2].data == b""
    (choice,) = items[-2].summary.choices
    assert (choice.tokens, choice.finish_reason) == (3, None)
    assert names.DECODE in {one.name for one in items[-2].summary.stages}


async def test_without_a_token_the_choices_times_are_unknown(ask: Any, byte_vocabulary: Vocabulary) -> None:
    engine = TimedEngine(b"", error=EngineDied("dead"))
    summary = summary_of(await items_of(PostprocessService(byte_vocabulary, engine, UNTRACED), ask()))
    (choice,) = summary.choices
    assert (choice.first_token_s, choice.last_token_s, choice.longest_gap_s) == (None, None, None)
    assert [one.name for one in summary.stages] == [names.POSTPROCESS_QUEUE, names.ENGINE_QUEUE]


async def test_each_choice_has_its_own_phases(ask: Any, byte_vocabulary: Vocabulary) -> None:
    service = PostprocessService(byte_vocabulary, TimedEngine(b"ab"), UNTRACED)
    summary = summary_of(await items_of(service, ask(n=3)))
    assert len(summary.choices) == 3
    assert len([one for one in summary.stages if one.name == names.DECODE]) == 3
    assert summary.completion_tokens == 6
