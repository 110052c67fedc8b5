"""Tokens sent together (`postprocess.stream_coalesce_tokens`): when, and that nothing but the grouping differs."""

import asyncio
import time
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import ENDLESS, UNTRACED, ScriptedEngine, events_of, said, streamed
from streams import stream_of

from serve_app.errors import EngineDied
from serve_app.messages import (
    Closing,
    EngineDelta,
    EngineRequest,
    GenerateRequest,
    RequestContext,
    RequestKind,
    Sampling,
    TokenLogprob,
)
from serve_app.postprocess.choice import Choice
from serve_app.postprocess.job import Job
from serve_app.postprocess.render import DONE, renderer_for
from serve_app.postprocess.run import Run
from serve_app.postprocess.service import PostprocessService
from serve_app.telemetry.names import RENDER
from serve_app.vocabulary import Vocabulary

CHAT, COMPLETION = RequestKind.CHAT, RequestKind.COMPLETION
BOTH = pytest.mark.parametrize("kind", [CHAT, COMPLETION])


def texts_of(chunks: list[bytes], index: int = 0) -> list[str]:
    """The text of each chunk of a choice of a completion."""
    choices = [choice for event in events_of(chunks) for choice in event["choices"]]
    return [choice["text"] for choice in choices if choice["index"] == index]


def unfinished(chunks: list[bytes]) -> dict[int, str]:
    """The text of each choice of a completion that came to no end."""
    texts: dict[int, str] = {}
    for event in b"".join(chunks).split(b"\n\n")[:-1]:
        for choice in msgspec.json.decode(event.removeprefix(b"data: "))["choices"]:
            assert choice["finish_reason"] is None
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def scored(text: str, size: int = 1, reason: Any = "length") -> list[EngineDelta]:
    """The text in deltas of so many bytes, each byte with a log-probability of its own."""
    raw = text.encode()
    groups = [range(at, min(at + size, len(raw))) for at in range(0, len(raw), size)]
    return [
        EngineDelta(
            tuple(raw[at] for at in group),
            reason if group is groups[-1] else None,
            logprobs=tuple(TokenLogprob(raw[at], -float(at), ((raw[at], -float(at)), (0, -99.0))) for at in group),
            prompt_logprobs=(None, TokenLogprob(105, -2.0)) if group is groups[0] else None,
        )
        for group in groups
    ]


@pytest.mark.parametrize(
    ("tokens", "texts"),
    [
        (1, ["a", "b", "c", "d", "e", "f", "g", "h", ""]),
        (2, ["a", "bc", "de", "fg", "h"]),
        (3, ["a", "bcd", "efg", "h"]),
        (7, ["a", "bcdefgh", ""]),
        (1024, ["a", "bcdefgh"]),
    ],
)
def test_the_first_token_goes_alone_the_next_in_groups_and_the_last_with_what_is_left(
    ask: Any, answer: Any, tokens: int, texts: list[str]
) -> None:
    chunks = answer(ScriptedEngine(said("abcdefgh")), ask(COMPLETION, stream=True), tokens)
    assert texts_of(chunks) == texts
    assert streamed(chunks) == {0: ("abcdefgh", "stop")}


def test_the_first_token_waits_for_no_other_and_the_last_neither(
    ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any
) -> None:
    async def main() -> list[tuple[float, str]]:
        clock = asyncio.get_running_loop()
        script = [EngineDelta((97,)), 60, EngineDelta((98,)), 60, EngineDelta((99,), "length"), 60]
        service = PostprocessService(byte_vocabulary, ScriptedEngine(script), UNTRACED, coalesce_tokens=1024)
        came: list[tuple[float, str]] = []

        def sink(item: bytes | Closing) -> None:
            if isinstance(item, bytes):
                came.append((clock.time(), texts_of([item, DONE])[0]))

        await service.generate(ask(COMPLETION, stream=True), sink)
        return came

    assert run_virtual(main()) == [(0, "a"), (120, "bc")]


def test_tokens_are_counted_and_not_the_engines_steps(ask: Any, answer: Any) -> None:
    chunks = answer(ScriptedEngine(said("abcdefghijklmn", size=3)), ask(COMPLETION, stream=True), 4)
    assert texts_of(chunks) == ["abc", "defghi", "jklmn", ""]


def test_a_token_that_completes_no_text_counts_and_sends_no_chunk_of_its_own(ask: Any, answer: Any) -> None:
    chunks = answer(ScriptedEngine(said("a龘b")), ask(COMPLETION, stream=True), 2)
    # One token, then two of the character's three bytes, its last byte with the next letter, and the end.
    assert texts_of(chunks) == ["a", "龘b", ""]


def test_the_first_text_goes_at_once_also_where_it_takes_several_tokens(ask: Any, byte_vocabulary: Any) -> None:
    run = Run(Choice(0, byte_vocabulary, (), (), Sampling()), None, None, coalesce_tokens=8)  # type: ignore[arg-type]
    due = [run.due(run.choice.push(EngineDelta((byte,))), 1) for byte in "龘ab".encode()]
    assert [update and update.text for update in due] == ["", "", "龘", None, None]


def test_each_choice_counts_its_own_tokens(ask: Any, answer: Any) -> None:
    engine = ScriptedEngine(said("abcdefg"), said("tu"), [5, *said("vwxyz", "length")])
    chunks = answer(engine, ask(COMPLETION, n=3, stream=True), 3)
    assert [texts_of(chunks, index) for index in range(3)] == [["a", "bcd", "efg", ""], ["t", "u"], ["v", "wxy", "z"]]
    assert streamed(chunks) == {0: ("abcdefg", "stop"), 1: ("tu", "stop"), 2: ("vwxyz", "length")}


@BOTH
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tokens", [2, 5, 1024])
def test_a_stop_string_sends_what_waits_and_ends_the_choice_in_the_engine(
    ask: Any, answer: Any, kind: RequestKind, tokens: int, n: int
) -> None:
    engine = ScriptedEngine([*said("go on STOP")[:-1], *ENDLESS])
    chunks = answer(engine, ask(kind, n=n, stop=("STOP",), stream=True), tokens)
    assert streamed(chunks) == dict.fromkeys(range(n), ("go on ", "stop"))
    assert engine.closed == [True] * n
    assert all(given <= len("go on STOP") + 2 for given in engine.given)


@pytest.mark.parametrize("tokens", [1, 3, 1024])
@pytest.mark.parametrize("end", [[EngineDied("dead")], []], ids=["an error", "an early end"])
def test_what_waits_when_the_request_fails_is_sent_ahead_of_what_was_measured(
    ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any, tokens: int, end: list[Any]
) -> None:
    async def main() -> None:
        scripts = [*said("hello")[:-1], None], [*said("wonderful")[:-1], None], [*said("world")[:-1], 1, *end]
        service = PostprocessService(byte_vocabulary, ScriptedEngine(*scripts), UNTRACED, coalesce_tokens=tokens)
        items: list[Any] = []
        with pytest.raises(EngineDied):
            await service.generate(ask(COMPLETION, n=3, stream=True), items.append)
        *chunks, closing = items
        assert unfinished(chunks) == {0: "hello", 1: "wonderful", 2: "world"}
        assert isinstance(closing, Closing)
        assert closing.data == b""
        assert [choice.tokens for choice in closing.summary.choices] == [5, 9, 5]

    run_virtual(main())


def test_what_waits_and_says_nothing_is_not_sent_when_the_request_fails(
    ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any
) -> None:
    async def main() -> None:
        engine = ScriptedEngine([EngineDelta((97,)), EngineDelta((0xE9,)), EngineDied("dead")])
        service = PostprocessService(byte_vocabulary, engine, UNTRACED, coalesce_tokens=3)
        items: list[Any] = []
        with pytest.raises(EngineDied):
            await service.generate(ask(COMPLETION, stream=True), items.append)
        first, closing = items
        assert unfinished([first]) == {0: "a"}
        assert isinstance(closing, Closing)

    run_virtual(main())


def test_an_answer_that_is_not_streamed_and_fails_has_nothing_to_send(
    ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any
) -> None:
    async def main() -> None:
        engine = ScriptedEngine([*said("hello")[:-1], EngineDied("dead")])
        items: list[Any] = []
        with pytest.raises(EngineDied):
            await PostprocessService(byte_vocabulary, engine, UNTRACED, coalesce_tokens=3).generate(ask(), items.append)
        assert [item.data for item in items] == [b""]

    run_virtual(main())


def test_a_reader_that_leaves_gets_nothing_of_what_waits(
    ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any
) -> None:
    async def main() -> None:
        engine = ScriptedEngine([*said("hello")[:-1], None])
        service = PostprocessService(byte_vocabulary, engine, UNTRACED, coalesce_tokens=1024)
        items: list[Any] = []
        work = asyncio.create_task(service.generate(ask(COMPLETION, stream=True), items.append))
        await asyncio.sleep(1)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert unfinished(items) == {0: "h"}
        assert engine.closed == [True]

    run_virtual(main())


def test_a_first_token_goes_out_while_the_engine_thinks(
    ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any
) -> None:
    async def main() -> None:
        service = PostprocessService(
            byte_vocabulary, ScriptedEngine([EngineDelta((97,)), None]), UNTRACED, coalesce_tokens=8
        )
        async with aclosing(stream_of(service, ask(stream=True))) as chunks:
            assert b'"content":"a"' in await anext(chunks)

    run_virtual(main())


@BOTH
@pytest.mark.parametrize("tokens", [2, 3, 4, 1024])
def test_log_probabilities_are_those_of_the_ungrouped_stream(
    ask: Any, answer: Any, kind: RequestKind, tokens: int
) -> None:
    fields = {"sampling": Sampling(logprobs=1), "stop": ("END",), "n": 2, "stream": True}
    engine_of = lambda: ScriptedEngine(scored("a龘b cENDd"), scored("日本語 x", size=2))  # noqa: E731
    alone, grouped = answer(engine_of(), ask(kind, **fields)), answer(engine_of(), ask(kind, **fields), tokens)
    assert streamed(grouped) == streamed(alone)
    for index in (0, 1):
        assert rows_of(grouped, index) == rows_of(alone, index)
    assert len(grouped) < len(alone)


@pytest.mark.parametrize("tokens", [2, 1024])
def test_an_echo_comes_at_once_with_its_log_probabilities(ask: Any, answer: Any, tokens: int) -> None:
    sampling = Sampling(logprobs=1, prompt_logprobs=1)
    fields = {"echo_texts": ("Hi",), "sampling": sampling, "stream": True, "include_usage": True}
    engine_of = lambda: ScriptedEngine(scored("abcdef"))  # noqa: E731
    alone, grouped = (answer(engine_of(), ask(COMPLETION, (b"Hi",), **fields), count) for count in (1, tokens))
    assert texts_of(grouped)[:2] == (["Hia", "bc"] if tokens == 2 else ["Hia", "bcdef"])
    assert rows_of(grouped) == rows_of(alone)
    assert [row[2] for row in rows_of(grouped)] == list(range(8))
    assert events_of(grouped)[-1] == events_of(alone)[-1]


def test_with_a_discarded_output_there_is_one_chunk(ask: Any, answer: Any) -> None:
    request = ask(COMPLETION, (b"Hi",), echo_texts=("Hi",), discard_output=True, stream=True)
    chunks = answer(ScriptedEngine([EngineDelta((97,), "length")]), request, 8)
    assert streamed(chunks) == {0: ("Hi", "length")}
    assert texts_of(chunks) == ["Hi"]


@BOTH
def test_an_answer_that_is_not_streamed_is_the_same(ask: Any, answer: Any, kind: RequestKind) -> None:
    engine_of = lambda: ScriptedEngine(said("hello END"))  # noqa: E731
    assert answer(engine_of(), ask(kind, stop=("END",)), 5) == answer(engine_of(), ask(kind, stop=("END",)))


def test_a_group_is_rendered_once(ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any) -> None:
    async def main() -> int:
        items: list[Any] = []
        service = PostprocessService(byte_vocabulary, ScriptedEngine(said("abcdefgh")), UNTRACED, coalesce_tokens=4)
        await service.generate(ask(stream=True), items.append)
        return next(one.count for one in items[-1].summary.stages if one.name == RENDER)

    assert run_virtual(main()) == 3


def rows_of(chunks: list[bytes], index: int = 0) -> list[Any]:
    """All tokens of a choice with their log-probabilities, as they come chunk by chunk."""
    rows: list[Any] = []
    for choice in [choice for event in events_of(chunks) for choice in event["choices"] if choice["index"] == index]:
        found = choice["logprobs"] or {"content": []}
        if "content" in found:
            rows += found["content"]
        else:
            names = ("tokens", "token_logprobs", "text_offset", "top_logprobs")
            rows += zip(*(found[name] for name in names), strict=True)
    return rows


@given(
    kind=st.sampled_from([CHAT, COMPLETION]),
    text=st.text("abEND日龘", min_size=1, max_size=40),
    size=st.integers(1, 5),
    tokens=st.integers(1, 12),
    stop=st.sampled_from([(), ("END",), ("a", "日")]),
    cut=st.booleans(),
)
def test_whatever_is_said_and_however_it_ends_the_grouped_stream_says_the_same(
    byte_vocabulary: Vocabulary, kind: RequestKind, text: str, size: int, tokens: int, stop: tuple[str, ...], cut: bool
) -> None:
    def generated(coalesce_tokens: int) -> tuple[str, list[Any], str | None, list[str]]:
        job = job_of(byte_vocabulary, kind, stop, coalesce_tokens)
        (run,) = job.runs
        chunks = []
        for delta in scored(text, size, None if cut else "length"):
            chunks.append(job.take(run, delta))
            if run.finish_reason is not None:
                break
        chunks = [chunk for chunk in (*chunks, *job.held(), DONE) if chunk]
        assert [*job.held()] == []
        pieces = []
        for event in events_of(chunks):
            (choice,) = event["choices"]
            pieces.append(choice["text"] if kind is COMPLETION else choice["delta"].get("content", ""))
        return "".join(pieces), rows_of(chunks), run.finish_reason, pieces

    alone, grouped = generated(1), generated(tokens)
    assert grouped[:3] == alone[:3]
    assert len(grouped[3]) <= len(alone[3])


def job_of(vocabulary: Vocabulary, kind: RequestKind, stop: tuple[str, ...], coalesce_tokens: int) -> Job:
    context, sampling = RequestContext("r", time.time() + 60), Sampling(logprobs=1)
    request = GenerateRequest(
        context=context,
        kind=kind,
        model="m",
        created_s=1,
        prompt_ids=((112,),),
        max_tokens=(99,),
        sampling=sampling,
        stop=stop,
        stream=True,
    )
    choice = Choice(0, vocabulary, (112,), stop, sampling)
    run = Run(choice, EngineRequest(context, "r", (112,), 99, sampling), None, coalesce_tokens)
    return Job(request, [run], renderer_for(request, vocabulary), time.time(), keep_text=False)
