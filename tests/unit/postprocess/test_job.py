"""What a generation says of itself at its end, however that was."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from streams import pushing, stream_of

from serve_app.config import TracingSection
from serve_app.errors import EngineDied, InvalidRequest
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
from serve_app.telemetry.tracing import Tracing, start
from serve_app.vocabulary import Vocabulary

UNTRACED = start(TracingSection(), "postprocess", "test", "m")


class TimedEngine:
    """Gives the bytes of a text one by one, with vLLM's four times on the first and the last delta."""

    def __init__(self, text: bytes, ends: bool = True, error: Exception | None = None) -> None:
        self._text, self._ends, self._error = text, ends, error

    @pushing
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
        async for item in stream_of(service, request):
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


async def test_a_stop_string_does_not_cost_decode_its_length(ask: Any, byte_vocabulary: Vocabulary) -> None:
    items = await items_of(PostprocessService(byte_vocabulary, TimedEngine(b"hello"), UNTRACED), ask(stop=("lo",)))
    summary = summary_of(items)
    (decode,) = [one for one in summary.stages if one.name == names.DECODE]
    detokenizing = next(one for one in summary.stages if one.name == names.DETOKENIZE)
    # Until the last delta came, and not until the engine told its times, which was with the first.
    assert decode.end_s == detokenizing.pieces[-1][0] == summary.choices[0].last_token_s


@pytest.mark.parametrize("error", [None, EngineDied("dead")])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_there_is_one_closing_and_nothing_but_an_error_behind_it(
    ask: Any, byte_vocabulary: Vocabulary, n: int, stream: bool, error: Exception | None
) -> None:
    engine = TimedEngine(b"hel", ends=error is None, error=error)
    items = await items_of(PostprocessService(byte_vocabulary, engine, UNTRACED), ask(n=n, stream=stream))
    at = [isinstance(item, Closing) for item in items].index(True)
    assert items[at + 1 :] == ([] if error is None else [error])
    assert (items[at].data == b"") == (error is not None)
    assert len(items[at].summary.choices) == n
    assert all(isinstance(item, bytes) for item in items[:at])
    assert stream or at == 0


async def test_each_prompt_is_counted_once_and_every_choices_tokens_are(ask: Any, byte_vocabulary: Vocabulary) -> None:
    class Cached(TimedEngine):
        @pushing
        async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
            yield EngineDelta((97, 98), "length", cached_tokens=len(request.prompt_ids))

    request = ask(prompt_ids=((1, 2, 3), (4,)), max_tokens=(8, 8), n=2)
    summary = summary_of(await items_of(PostprocessService(byte_vocabulary, Cached(b""), UNTRACED), request))
    assert (summary.prompt_tokens, summary.completion_tokens, summary.cached_tokens) == (4, 8, 4)
    assert [choice.tokens for choice in summary.choices] == [2, 2, 2, 2]


async def test_every_stage_lies_between_the_sending_and_the_end(ask: Any, byte_vocabulary: Vocabulary) -> None:
    request = ask(n=2, stream=True)
    service = PostprocessService(byte_vocabulary, TimedEngine(b"hello"), UNTRACED)
    summary = summary_of(await items_of(service, request))
    ended_s = time.time()
    for one in summary.stages:
        assert request.context.sent_s <= one.begin_s <= one.end_s <= ended_s, one


async def test_a_reader_that_leaves_leaves_nothing_in_flight(ask: Any, byte_vocabulary: Vocabulary) -> None:
    service = PostprocessService(byte_vocabulary, TimedEngine(b"hello"), UNTRACED)
    async with aclosing(stream_of(service, ask(stream=True))) as items:
        await anext(items)
        assert service.in_flight == 1
    assert service.in_flight == 0


@pytest.mark.parametrize("include_timings", [True, False])
@pytest.mark.parametrize("include_usage", [True, False])
async def test_a_streams_last_bytes_have_room_for_what_was_asked(
    ask: Any, byte_vocabulary: Vocabulary, include_usage: bool, include_timings: bool
) -> None:
    request = ask(stream=True, include_usage=include_usage, include_timings=include_timings)
    items = await items_of(PostprocessService(byte_vocabulary, TimedEngine(b"}"), UNTRACED), request)
    *events, done, end = items[-1].data.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    assert len(events) == (include_usage or include_timings)
    assert all(event.endswith(b"}") and (b'"usage"' in event) == include_usage for event in events)


# What is on the hop's span.


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def traced(spans: InMemorySpanExporter, capture_content: bool) -> Tracing:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return Tracing(provider, None, capture_content)


def sampled(request: GenerateRequest) -> GenerateRequest:
    context = msgspec.structs.replace(request.context, traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    return msgspec.structs.replace(request, context=context)


def words_of(spans: InMemorySpanExporter) -> str:
    return repr([(one.name, dict(one.attributes or {}), one.status.description) for one in spans.get_finished_spans()])


@pytest.mark.parametrize("grouped", [1, 4])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("capture", [True, False])
async def test_a_completion_is_on_the_span_where_the_configuration_says_so(
    ask: Any, byte_vocabulary: Vocabulary, spans: InMemorySpanExporter, capture: bool, stream: bool, grouped: int
) -> None:
    engine, tracing = TimedEngine(b"my answer, my stop"), traced(spans, capture)
    service = PostprocessService(byte_vocabulary, engine, tracing, coalesce_tokens=grouped)
    await items_of(service, sampled(ask(stop=("my stop",), stream=stream)))
    assert ("my answer, " in words_of(spans)) == capture
    assert "my stop" not in words_of(spans)
    span = next(one for one in spans.get_finished_spans() if one.name == names.POSTPROCESS)
    assert span.attributes is not None
    assert span.attributes["tokenline.stop_string"] is True
    for one in spans.get_finished_spans():
        assert span.start_time <= one.start_time <= one.end_time <= span.end_time, one.name


@pytest.mark.parametrize(
    ("error", "code"), [(RuntimeError("my answer"), "internal_error"), (InvalidRequest("my answer"), "invalid_value")]
)
async def test_an_errors_words_are_on_no_span(
    ask: Any, byte_vocabulary: Vocabulary, spans: InMemorySpanExporter, error: Exception, code: str
) -> None:
    service = PostprocessService(byte_vocabulary, TimedEngine(b"hel", False, error), traced(spans, False))
    assert (await items_of(service, sampled(ask())))[-1] is error
    span = next(one for one in spans.get_finished_spans() if one.name == names.POSTPROCESS)
    assert span.attributes is not None
    assert span.attributes["error.type"] == code
    assert "my answer" not in words_of(spans)


async def test_a_whole_answer_is_none_that_was_cancelled_when_its_reader_goes(
    ask: Any, byte_vocabulary: Vocabulary, spans: InMemorySpanExporter
) -> None:
    service = PostprocessService(byte_vocabulary, TimedEngine(b"hi"), traced(spans, False))
    async with aclosing(stream_of(service, sampled(ask()))) as items:
        assert isinstance(await anext(items), Closing)
    span = next(one for one in spans.get_finished_spans() if one.name == names.POSTPROCESS)
    assert "error.type" not in (span.attributes or {})
