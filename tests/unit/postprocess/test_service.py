"""The postprocess hop over a scripted engine: what goes to the engine, what comes out, and that nothing stays open."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from scripted_engine import ENDLESS, REPORT, UNTRACED, ScriptedEngine, bytes_of, events_of, said, streamed, whole
from streams import collected, pushing, stream_of

from serve_app.errors import EngineDied, InvalidRequest
from serve_app.messages import (
    EngineDelta,
    EngineRequest,
    PathReport,
    RequestContext,
    RequestKind,
    Sampling,
    TokenLogprob,
)
from serve_app.postprocess.service import PostprocessService
from serve_app.vocabulary import Vocabulary

CHAT, COMPLETION = RequestKind.CHAT, RequestKind.COMPLETION
BOTH = pytest.mark.parametrize("kind", [CHAT, COMPLETION])


@BOTH
@pytest.mark.parametrize("stop", [(), ("END",), ("龘",), ("o", "lo")])
@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_stream_and_a_body_have_the_same_text(
    ask: Any, answer: Any, kind: RequestKind, stop: tuple[str, ...], size: int
) -> None:
    engine_of = lambda: ScriptedEngine(said("hello 龘 END!", size=size), said("日本語", size=size))  # noqa: E731
    in_pieces = streamed(answer(engine_of(), ask(kind, n=2, stop=stop, stream=True)))
    at_once = whole(answer(engine_of(), ask(kind, n=2, stop=stop)))
    cut = {(): "hello 龘 END!", ("END",): "hello 龘 ", ("龘",): "hello ", ("o", "lo"): "hel"}[stop]
    assert in_pieces == at_once == {0: (cut, "stop"), 1: ("日本語", "stop")}


@BOTH
@pytest.mark.parametrize("stream", [True, False])
def test_choices_are_numbered_prompt_by_prompt_whichever_ends_first(
    ask: Any, answer: Any, kind: RequestKind, stream: bool
) -> None:
    engine = ScriptedEngine([3, *said("p0n0")], [2, *said("p0n1")], [1, *said("p1n0")], said("p1n1", "length"))
    chunks = answer(engine, ask(kind, (b"zero", b"one"), n=2, stream=stream))
    assert (streamed if stream else whole)(chunks) == {
        0: ("p0n0", "stop"),
        1: ("p0n1", "stop"),
        2: ("p1n0", "stop"),
        3: ("p1n1", "length"),
    }


def test_every_choice_is_a_request_of_its_own_to_the_engine(ask: Any, answer: Any, context: RequestContext) -> None:
    engine = ScriptedEngine(said("x"))
    answer(engine, ask(COMPLETION, (b"zero", b"one"), n=2, sampling=Sampling(temperature=0.5, min_tokens=3)))
    assert [(r.engine_request_id, bytes(r.prompt_ids), r.max_tokens) for r in engine.requests] == [
        ("r1-0", b"zero", 10),
        ("r1-1", b"zero", 10),
        ("r1-2", b"one", 11),
        ("r1-3", b"one", 11),
    ]
    assert all(r.context.sent_s is not None for r in engine.requests)
    assert all(msgspec.structs.replace(r.context, sent_s=None) == context for r in engine.requests)
    assert all(r.sampling == Sampling(temperature=0.5, min_tokens=3) for r in engine.requests)


def test_a_lone_choice_runs_under_the_requests_own_id(ask: Any, answer: Any) -> None:
    engine = ScriptedEngine(said("x"))
    answer(engine, ask())
    assert [r.engine_request_id for r in engine.requests] == ["r1"]


@pytest.mark.parametrize(
    ("seed", "n", "seeds"),
    [
        (7, 3, [7, 8, 9, 7, 8, 9]),
        (7, 1, [7, 7]),
        (None, 2, [None] * 4),
        (-5, 1, [-5, -5]),
        (-5, 2, [-5, -4, -5, -4]),
    ],
)
def test_each_choice_of_a_prompt_has_a_seed_of_its_own(
    ask: Any, answer: Any, seed: int | None, n: int, seeds: list[int | None]
) -> None:
    engine = ScriptedEngine(said("x"))
    answer(engine, ask(COMPLETION, (b"zero", b"one"), n=n, sampling=Sampling(seed=seed)))
    assert [r.sampling.seed for r in engine.requests] == seeds


def test_the_seeds_of_later_choices_stay_within_64_bits(ask: Any, answer: Any) -> None:
    engine = ScriptedEngine(said("x"))
    answer(engine, ask(n=3, sampling=Sampling(seed=(1 << 63) - 1)))
    seeds = [r.sampling.seed for r in engine.requests]
    assert seeds[0] == (1 << 63) - 1
    assert len(set(seeds)) == 3
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in seeds if seed is not None)


@pytest.mark.parametrize("n", [1, 2])
def test_the_engines_stream_is_closed_before_the_chunk_with_the_stop_string_is_sent(
    ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any, n: int
) -> None:
    async def main() -> None:
        engine = ScriptedEngine([*said("go STOP")[:-1], *ENDLESS], [None])
        stream = stream_of(PostprocessService(byte_vocabulary, engine, UNTRACED), ask(n=n, stop=("STOP",), stream=True))
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                if b'"finish_reason":"stop"' in chunk:
                    break
            # A client that reads slowly must not keep the engine at work on text that nobody will see.
            await asyncio.sleep(60)
            assert engine.closed[0]
            assert engine.given[0] == len("go STOP")

    run_virtual(main())


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_the_choice_in_the_engine(ask: Any, answer: Any, stream: bool) -> None:
    engine = ScriptedEngine([*said("go STOP")[:-1], *ENDLESS], said("other"))
    chunks = answer(engine, ask(n=2, stop=("STOP",), stream=stream))
    assert (streamed if stream else whole)(chunks) == {0: ("go ", "stop"), 1: ("other", "stop")}
    assert engine.closed == [True, True]
    assert engine.given[0] <= len("go STOP") + 2


@BOTH
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [[], said("ab")[:-1]], ids=["at once", "midway"])
def test_an_engine_stream_that_ends_without_a_finish_reason_is_a_dead_engine(
    ask: Any, answer: Any, kind: RequestKind, stream: bool, script: list[Any]
) -> None:
    with pytest.raises(EngineDied):
        answer(ScriptedEngine(script), ask(kind, stream=stream))


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_in_one_choice_is_the_requests_error_and_closes_the_others(
    ask: Any, answer: Any, stream: bool
) -> None:
    engine = ScriptedEngine([*said("x")[:-1], None], [1, InvalidRequest("no", "top_k")], [None])
    with pytest.raises(InvalidRequest) as raised:
        answer(engine, ask(n=3, stream=stream))
    assert (raised.value.message, raised.value.param) == ("no", "top_k")
    assert engine.closed == [True, True, True]


@pytest.mark.parametrize("n", [1, 3])
def test_closing_the_response_closes_every_engine_stream(
    ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any, n: int
) -> None:
    async def main() -> None:
        engine = ScriptedEngine([EngineDelta((97,)), None])
        service = PostprocessService(byte_vocabulary, engine, UNTRACED)
        async with aclosing(stream_of(service, ask(n=n, stream=True))) as chunks:
            for _ in range(n):
                await anext(chunks)
            assert engine.closed == [False] * n
        assert engine.closed == [True] * n
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_cancelling_the_caller_closes_every_engine_stream(
    ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any, n: int, stream: bool
) -> None:
    async def main() -> None:
        engine = ScriptedEngine([EngineDelta((97,)), None])

        service = PostprocessService(byte_vocabulary, engine, UNTRACED)
        reader = asyncio.create_task(collected(service, ask(n=n, stream=stream)))
        await asyncio.sleep(1)
        assert engine.given == [1] * n
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert engine.closed == [True] * n

    run_virtual(main())


def test_nothing_is_asked_of_the_engine_before_the_response_is_read(
    ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any
) -> None:
    async def main() -> None:
        engine = ScriptedEngine([None])
        work = PostprocessService(byte_vocabulary, engine, UNTRACED).generate(ask(n=2, stream=True), print)
        await asyncio.sleep(0)
        assert engine.requests == []
        work.close()

    run_virtual(main())


def test_the_first_chunk_of_every_chat_choice_carries_the_role_and_no_other_does(ask: Any, answer: Any) -> None:
    events = events_of(answer(ScriptedEngine(said("ab")), ask(n=2, stream=True)))
    for index in (0, 1):
        deltas = [c["delta"] for event in events for c in event["choices"] if c["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert [delta for delta in deltas if "role" in delta] == deltas[:1]


def test_the_role_goes_out_with_the_engines_first_delta_even_without_text(
    ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any
) -> None:
    async def main() -> None:
        engine = ScriptedEngine([EngineDelta((0xE9,)), None])
        async with aclosing(
            stream_of(PostprocessService(byte_vocabulary, engine, UNTRACED), ask(stream=True))
        ) as chunks:
            assert b'"role":"assistant"' in await anext(chunks)

    run_virtual(main())


def test_deltas_that_complete_no_text_send_no_chunk(ask: Any, answer: Any) -> None:
    chunks = answer(ScriptedEngine(said("龘")), ask(COMPLETION, stream=True))
    texts = [event["choices"][0]["text"] for event in events_of(chunks)]
    assert texts == ["", "龘", ""]


def test_text_goes_out_as_soon_as_the_engine_has_given_it(
    ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any
) -> None:
    async def main() -> None:
        engine = ScriptedEngine([EngineDelta((97,)), None])
        request = ask(COMPLETION, stream=True, stop=("b",))
        async with aclosing(stream_of(PostprocessService(byte_vocabulary, engine, UNTRACED), request)) as chunks:
            assert b'"text":"a"' in await anext(chunks)

    run_virtual(main())


@BOTH
def test_the_usage_chunk_comes_last_before_done_and_only_where_it_was_asked_for(
    ask: Any, answer: Any, kind: RequestKind
) -> None:
    engine_of = lambda: ScriptedEngine(said("abc", cached_tokens=1), said("d", cached_tokens=5))  # noqa: E731
    *chunks, last = events_of(answer(engine_of(), ask(kind, (b"prompt",), n=2, stream=True, include_usage=True)))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 6,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert all(chunk["usage"] is None for chunk in chunks)
    without = events_of(answer(engine_of(), ask(kind, n=2, stream=True)))
    assert all(event["choices"] and "usage" not in event for event in without)


def test_usage_counts_each_prompt_once_and_every_token_that_was_generated(ask: Any, answer: Any) -> None:
    engine = ScriptedEngine(
        said("aSTOPxx", cached_tokens=0, size=100),
        said("bb"),
        [EngineDelta((97,), cached_tokens=3), *said("c")],
        said("龘"),
    )
    (body,) = answer(engine, ask(COMPLETION, (b"four", b"three"), n=2, stop=("STOP",)))
    assert msgspec.json.decode(body)["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 5 + 3 + 3 + 4,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_usage_is_the_same_however_the_engine_groups_its_tokens(ask: Any, answer: Any) -> None:
    usages = []
    for size in (1, 3, 100):
        (body,) = answer(ScriptedEngine(said("one STOP two", size=size)), ask(stop=("STOP",)))
        usages.append(msgspec.json.decode(body)["usage"])
    assert usages[0] == usages[1] == usages[2]


@pytest.mark.parametrize("stream", [True, False])
def test_an_echo_of_a_text_is_that_text_and_of_ids_is_what_they_decode_to(ask: Any, answer: Any, stream: bool) -> None:
    request = ask(COMPLETION, (b"ignored", "日!".encode()), n=2, echo_texts=("as sent ", None), stream=stream)
    chunks = answer(ScriptedEngine(said("x")), request)
    assert (streamed if stream else whole)(chunks) == {
        0: ("as sent x", "stop"),
        1: ("as sent x", "stop"),
        2: ("日!x", "stop"),
        3: ("日!x", "stop"),
    }


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_in_the_echo_does_not_end_the_text(ask: Any, answer: Any, stream: bool) -> None:
    request = ask(COMPLETION, (b"STOP ST",), echo_texts=("STOP ST",), stop=("STOP",), stream=stream)
    chunks = answer(ScriptedEngine(said("OP!")), request)
    assert (streamed if stream else whole)(chunks) == {0: ("STOP STOP!", "stop")}


@pytest.mark.parametrize("stream", [True, False])
def test_an_echo_has_the_prompts_log_probabilities_ahead_of_the_texts(ask: Any, answer: Any, stream: bool) -> None:
    first = EngineDelta(
        (97,), logprobs=(TokenLogprob(97, -3.0),), prompt_logprobs=(None, TokenLogprob(105, -2.0, ((106, -1.0),)))
    )
    last = EngineDelta((98,), "length", logprobs=(TokenLogprob(98, -4.0),))
    sampling = Sampling(logprobs=1, prompt_logprobs=1)
    request = ask(COMPLETION, (b"Hi",), echo_texts=("Hi",), sampling=sampling, stream=stream)
    chunks = answer(ScriptedEngine([first, last]), request)
    parts = events_of(chunks) if stream else [msgspec.json.decode(chunks[0])]
    merged: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for name, rows in part["choices"][0]["logprobs"].items():
            merged[name] += rows
    assert merged == {
        "tokens": ["H", "i", "a", "b"],
        "token_logprobs": [None, -2.0, -3.0, -4.0],
        "top_logprobs": [None, {"j": -1.0, "i": -2.0}, {"a": -3.0}, {"b": -4.0}],
        "text_offset": [0, 1, 2, 3],
    }


@pytest.mark.parametrize("stream", [True, False])
def test_with_a_discarded_output_only_the_prompt_is_returned_and_nothing_counted(
    ask: Any, answer: Any, stream: bool
) -> None:
    only = EngineDelta(
        (97,),
        "length",
        logprobs=(TokenLogprob(97, -3.0),),
        prompt_logprobs=(None, TokenLogprob(105, -2.0)),
    )
    request = ask(
        COMPLETION,
        (b"Hi",),
        echo_texts=("Hi",),
        discard_output=True,
        sampling=Sampling(logprobs=0, prompt_logprobs=0),
        stream=stream,
        include_usage=stream,
    )
    chunks = answer(ScriptedEngine([only]), request)
    assert (streamed if stream else whole)(chunks) == {0: ("Hi", "length")}
    parts = events_of(chunks) if stream else [msgspec.json.decode(chunks[0])]
    assert parts[0]["choices"][0]["logprobs"]["tokens"] == ["H", "i"]
    assert parts[-1]["usage"]["completion_tokens"] == 0
    assert parts[-1]["usage"]["prompt_tokens"] == 2


def test_a_discarded_token_that_would_have_ended_the_text_does_not_show_in_the_finish_reason(
    ask: Any, answer: Any
) -> None:
    request = ask(COMPLETION, (b"Hi",), echo_texts=("Hi",), discard_output=True)
    assert whole(answer(ScriptedEngine(said("")), request)) == {0: ("Hi", "length")}


def test_log_probabilities_of_a_chat_cover_the_text_exactly(ask: Any, answer: Any) -> None:
    raw = "a龘 END".encode()
    script = [EngineDelta((byte,), logprobs=(TokenLogprob(byte, -1.0),)) for byte in raw]
    (body,) = answer(ScriptedEngine(script), ask(stop=(" END",), sampling=Sampling(logprobs=0)))
    choice = msgspec.json.decode(body)["choices"][0]
    assert choice["message"]["content"] == "a龘"
    assert bytes(sum((token["bytes"] for token in choice["logprobs"]["content"]), [])).decode() == "a龘"


def test_the_report_is_the_engines_with_the_tasks_of_this_hop(byte_vocabulary: Vocabulary, run_virtual: Any) -> None:
    report = run_virtual(PostprocessService(byte_vocabulary, ScriptedEngine(), UNTRACED).report())
    assert report == PathReport(REPORT.engine, {"engine": 3, "postprocess": 1})


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_stream_that_says_it_is_done_is_read_to_its_own_end(
    ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any, stream: bool
) -> None:
    async def main() -> None:
        ended = []

        class Ending(ScriptedEngine):
            @pushing
            async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
                for delta in said("a"):
                    yield delta
                ended.append(request.engine_request_id)

        await collected(PostprocessService(byte_vocabulary, Ending(), UNTRACED), ask(n=2, stream=stream))
        assert sorted(ended) == ["r1-0", "r1-1"]

    run_virtual(main())


def test_one_service_serves_many_requests_at_once(ask: Any, byte_vocabulary: Vocabulary, run_virtual: Any) -> None:
    async def main() -> None:
        engine = ScriptedEngine(*([1, *said(f"answer {number}")] for number in range(50)))
        service = PostprocessService(byte_vocabulary, engine, UNTRACED)

        async def one() -> list[bytes]:
            return [bytes_of(item) for item in await collected(service, ask(stream=True))]

        answers = await asyncio.gather(*(one() for _ in range(50)))
        texts = sorted(streamed(chunks)[0][0] for chunks in answers)
        assert texts == sorted(f"answer {number}" for number in range(50))
        assert asyncio.get_running_loop().time() == pytest.approx(1)

    run_virtual(main())
