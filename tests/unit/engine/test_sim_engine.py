"""The simulated engine keeps the engine contract: deltas, limits, faults, and everything freed on closing."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from serve_app.config import SimSection
from serve_app.engine.sim_engine import SimEngine
from serve_app.errors import EngineDied, InvalidRequest
from serve_app.messages import EngineDelta, EngineRequest, LoadReport, RequestContext, Sampling

Deltas = AsyncGenerator[EngineDelta, None]


@pytest.fixture
def ask(context: RequestContext) -> Any:
    def make(prompt: tuple[int, ...] = (40, 41, 42), max_tokens: int = 5, **sampling: Any) -> EngineRequest:
        return EngineRequest(context, "r1", prompt, max_tokens, Sampling(**sampling))

    return make


@pytest.fixture
def with_engine(run_virtual: Any) -> Any:
    """Runs a coroutine function with a started engine on a virtual clock; stops the engine after it."""

    def run(work: Callable[[SimEngine], Awaitable[Any]], vocabulary_size: int = 1000, **config: Any) -> Any:
        async def main() -> Any:
            engine = SimEngine(SimSection(**config), vocabulary_size)
            await engine.start()
            try:
                return await work(engine)
            finally:
                await engine.stop()

        return run_virtual(main())

    return run


async def collect(stream: Deltas, got: list[EngineDelta] | None = None) -> list[EngineDelta]:
    """All deltas; into `got` too, for streams that do not end well."""
    got = [] if got is None else got
    async with aclosing(stream):
        async for delta in stream:
            got.append(delta)
    return got


def ids_of(deltas: list[EngineDelta]) -> tuple[int, ...]:
    return sum((delta.token_ids for delta in deltas), ())


def now_s() -> float:
    return asyncio.get_running_loop().time()


IDLE = LoadReport(running=0, waiting=0, kv_usage=0.0, kv_blocks=8192)


def test_a_request_gets_its_tokens_and_its_last_delta_alone_has_a_finish_reason(ask: Any, with_engine: Any) -> None:
    deltas = with_engine(lambda engine: collect(engine.generate(ask(max_tokens=7))))
    assert len(ids_of(deltas)) == 7
    assert [delta.finish_reason for delta in deltas] == [None] * 6 + ["length"]
    assert not any(delta.ends_with_stop_token for delta in deltas)


def test_ids_are_within_the_vocabulary_and_past_the_special_ones(ask: Any, with_engine: Any) -> None:
    deltas = with_engine(lambda engine: collect(engine.generate(ask(max_tokens=300))), vocabulary_size=100)
    assert set(ids_of(deltas)) <= set(range(32, 100))
    assert len(set(ids_of(deltas))) > 50


def test_ids_depend_on_the_prompt_and_the_seed_alone(ask: Any, with_engine: Any) -> None:
    def answer(request: EngineRequest, crowd: int = 0) -> tuple[int, ...]:
        async def work(engine: SimEngine) -> tuple[int, ...]:
            others = [asyncio.create_task(collect(engine.generate(ask((50 + n,), 9)))) for n in range(crowd)]
            ids = ids_of(await collect(engine.generate(request)))
            await asyncio.gather(*others)
            return ids

        return with_engine(work)

    first = answer(ask(max_tokens=20))
    assert answer(ask(max_tokens=20), crowd=5) == first
    assert answer(ask(max_tokens=8)) == first[:8]
    assert answer(ask((40, 41, 43), 20)) != first
    assert answer(ask(max_tokens=20, seed=1)) != first
    assert answer(ask(max_tokens=20, seed=1)) == answer(ask(max_tokens=20, seed=1))


def test_an_echo_repeats_the_prompt(ask: Any, with_engine: Any) -> None:
    deltas = with_engine(lambda engine: collect(engine.generate(ask((7, 8, 9), 7))), source="echo")
    assert ids_of(deltas) == (7, 8, 9, 7, 8, 9, 7)


def test_a_stop_token_ends_the_text_once_min_tokens_are_out(ask: Any, with_engine: Any) -> None:
    def answer(**sampling: Any) -> list[EngineDelta]:
        return with_engine(lambda engine: collect(engine.generate(ask((7, 8, 9), 7, **sampling))), source="echo")

    early, late = answer(stop_token_ids=(8,)), answer(stop_token_ids=(8,), min_tokens=2)
    assert (ids_of(early), early[-1].finish_reason, early[-1].ends_with_stop_token) == ((7, 8), "stop", True)
    assert (ids_of(late), late[-1].finish_reason) == ((7, 8, 9, 7, 8), "stop")


def test_log_probabilities_come_as_many_as_were_asked_for(ask: Any, with_engine: Any) -> None:
    def answer(count: int | None) -> list[EngineDelta]:
        return with_engine(lambda engine: collect(engine.generate(ask(logprobs=count))), vocabulary_size=40)

    assert all(delta.logprobs is None for delta in answer(None))
    for count in (0, 3):
        for delta in answer(count):
            assert delta.logprobs is not None
            (logprob,) = delta.logprobs
            assert (logprob.token_id,) == delta.token_ids
            assert len(logprob.top) == count
            assert [score for _, score in logprob.top] == sorted((score for _, score in logprob.top), reverse=True)
            assert all(0 <= token_id < 40 for token_id, _ in logprob.top)


def test_the_prompts_log_probabilities_come_with_the_first_delta_where_they_were_asked_for(
    ask: Any, with_engine: Any
) -> None:
    first, *others = with_engine(lambda engine: collect(engine.generate(ask(prompt_logprobs=0))))
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [one.token_id for one in first.prompt_logprobs[1:]] == [41, 42]
    assert all(delta.prompt_logprobs is None for delta in others)


def test_the_first_and_the_last_delta_say_when_the_engine_did_what(ask: Any, with_engine: Any) -> None:
    first, *others, last = with_engine(lambda engine: collect(engine.generate(ask())))
    assert all(delta.times is None for delta in others)
    assert first.times.first_token_s == first.times.last_token_s == last.times.first_token_s
    times = last.times
    assert times.queued_s <= times.scheduled_s <= times.first_token_s <= times.last_token_s


def test_a_step_takes_longer_with_more_sequences(ask: Any, with_engine: Any) -> None:
    async def seconds(engine: SimEngine, count: int) -> float:
        begin = now_s()
        await asyncio.gather(*(collect(engine.generate(ask(max_tokens=10))) for _ in range(count)))
        return now_s() - begin

    config = {"step_ms": 20.0, "step_ms_per_sequence": 5.0, "prefill_tokens_per_s": 1e9}
    assert with_engine(lambda engine: seconds(engine, 1), **config) == pytest.approx(10 * 0.025, abs=1e-3)
    assert with_engine(lambda engine: seconds(engine, 4), **config) == pytest.approx(10 * 0.040, abs=1e-3)


def test_prompts_are_prefilled_one_after_the_other(ask: Any, with_engine: Any) -> None:
    async def work(engine: SimEngine) -> float:
        await asyncio.gather(*(collect(engine.generate(ask((40,) * 50, 1))) for _ in range(3)))
        return now_s()

    assert with_engine(work, prefill_tokens_per_s=100.0, step_ms=0, step_ms_per_sequence=0) == pytest.approx(1.5)


def test_sequences_beyond_the_limit_wait_for_a_slot(ask: Any, with_engine: Any) -> None:
    async def work(engine: SimEngine) -> None:
        tasks = [asyncio.create_task(collect(engine.generate(ask()))) for _ in range(5)]
        await asyncio.sleep(0.03)
        load = await engine.load()
        assert (load.running, load.waiting) == (2, 3)
        await asyncio.gather(*tasks)
        assert await engine.load() == IDLE

    with_engine(work, max_sequences=2)


def test_sequences_wait_for_kv_blocks_and_get_them_when_others_have_ended(ask: Any, with_engine: Any) -> None:
    async def work(engine: SimEngine) -> None:
        # 3 + 5 tokens need two blocks of four; there are five, so that two sequences fit.
        tasks = [asyncio.create_task(collect(engine.generate(ask()))) for _ in range(3)]
        await asyncio.sleep(0.03)
        load = await engine.load()
        assert (load.running, load.waiting, load.kv_usage, load.kv_blocks) == (2, 1, 0.8, 5)
        first, second, third = await asyncio.gather(*tasks)
        assert third[-1].times.scheduled_s >= first[-1].times.scheduled_s
        assert len(second) == len(third) == 5
        assert (await engine.load()).kv_usage == 0

    with_engine(work, kv_blocks=5, block_tokens=4)


def test_a_request_that_all_blocks_together_cannot_hold_is_refused_with_the_counts(ask: Any, with_engine: Any) -> None:
    async def work(engine: SimEngine) -> None:
        with pytest.raises(InvalidRequest, match="needs 3 KV blocks and the engine has 2"):
            await collect(engine.generate(ask(max_tokens=6)))
        assert len(await collect(engine.generate(ask(max_tokens=5)))) == 5
        assert (await engine.load()).running == 0

    with_engine(work, kv_blocks=2, block_tokens=4)


def test_closing_a_running_generator_frees_its_blocks_and_its_slot(ask: Any, with_engine: Any) -> None:
    async def work(engine: SimEngine) -> None:
        async with aclosing(engine.generate(ask(max_tokens=1000))) as stream:
            await anext(stream)
            load = await engine.load()
            assert (load.running, load.kv_usage > 0) == (1, True)
        assert await engine.load() == IDLE

    with_engine(work)


def test_cancelling_the_reader_frees_the_blocks_and_lets_the_next_one_in(ask: Any, with_engine: Any) -> None:
    async def work(engine: SimEngine) -> None:
        first = asyncio.create_task(collect(engine.generate(ask(max_tokens=10**4))))
        second = asyncio.create_task(collect(engine.generate(ask())))
        await asyncio.sleep(0.1)
        assert ((await engine.load()).running, (await engine.load()).waiting) == (1, 1)
        first.cancel()
        assert len(await second) == 5
        assert (await engine.load()).kv_usage == 0

    with_engine(work, max_sequences=1)


def test_closing_a_generator_that_waits_takes_it_out_of_the_queue(ask: Any, with_engine: Any) -> None:
    async def work(engine: SimEngine) -> None:
        async with aclosing(engine.generate(ask(max_tokens=1000))) as running:
            await anext(running)
            waiting = asyncio.create_task(collect(engine.generate(ask())))
            await asyncio.sleep(0.1)
            assert (await engine.load()).waiting == 1
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            load = await engine.load()
            assert (load.running, load.waiting) == (1, 0)
        assert (await engine.load()).kv_usage == 0

    with_engine(work, max_sequences=1)


def test_closing_a_generator_while_its_prompt_is_prefilled_frees_its_blocks(ask: Any, with_engine: Any) -> None:
    async def work(engine: SimEngine) -> None:
        reader = asyncio.create_task(collect(engine.generate(ask((40,) * 100))))
        await asyncio.sleep(1)
        assert (await engine.load()).running == 1
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert await engine.load() == IDLE
        assert len(await collect(engine.generate(ask()))) == 5

    with_engine(work, prefill_tokens_per_s=10.0)


def test_a_generator_that_is_never_read_takes_nothing(ask: Any, with_engine: Any) -> None:
    async def work(engine: SimEngine) -> None:
        stream = engine.generate(ask())
        await asyncio.sleep(1)
        assert await engine.load() == IDLE
        await stream.aclose()

    with_engine(work)


def test_a_request_may_come_before_the_engine_has_started(ask: Any, run_virtual: Any) -> None:
    async def main() -> None:
        engine = SimEngine(SimSection(), 1000)
        reader = asyncio.create_task(collect(engine.generate(ask())))
        await asyncio.sleep(1)
        await engine.start()
        assert len(await reader) == 5
        await engine.stop()

    run_virtual(main())


@pytest.mark.parametrize("after", [0, 3])
def test_with_the_fault_fail_each_request_fails_after_its_tokens_and_the_engine_lives(
    ask: Any, with_engine: Any, after: int
) -> None:
    async def work(engine: SimEngine) -> None:
        for _ in range(2):
            got: list[EngineDelta] = []
            with pytest.raises(RuntimeError, match="A fault was asked for"):
                await collect(engine.generate(ask(max_tokens=10)), got)
            assert len(ids_of(got)) == after
        assert await engine.load() == IDLE

    with_engine(work, fail_after_tokens=after)


def test_a_request_shorter_than_the_fault_fail_is_served(ask: Any, with_engine: Any) -> None:
    assert len(with_engine(lambda engine: collect(engine.generate(ask())), fail_after_tokens=5)) == 5


@pytest.mark.parametrize("after", [0, 7])
def test_with_the_fault_die_every_request_and_every_later_call_says_that_the_engine_is_dead(
    ask: Any, with_engine: Any, after: int
) -> None:
    async def work(engine: SimEngine) -> None:
        got: list[EngineDelta] = []
        readers = (collect(engine.generate(ask(max_tokens=10)), got) for _ in range(3))
        outcomes = await asyncio.gather(*readers, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineDied] * 3
        assert len(ids_of(got)) == after
        with pytest.raises(EngineDied):
            await engine.load()
        with pytest.raises(EngineDied):
            await collect(engine.generate(ask()))

    # Two run and one waits when the engine dies.
    with_engine(work, die_after_tokens=after, max_sequences=2)


def test_with_the_fault_stall_a_request_stops_making_progress_and_closing_it_frees_its_blocks(
    ask: Any, with_engine: Any
) -> None:
    async def work(engine: SimEngine) -> None:
        async with aclosing(engine.generate(ask(max_tokens=10))) as stream:
            assert len([await anext(stream) for _ in range(3)]) == 3
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(60):
                    await anext(stream)
        assert await engine.load() == IDLE

    with_engine(work, stall_after_tokens=3)


def test_an_engine_can_be_stopped_twice_and_without_having_started(run_virtual: Any) -> None:
    async def main() -> None:
        await SimEngine(SimSection(), 1000).stop()
        engine = SimEngine(SimSection(), 1000)
        await engine.start()
        await engine.stop()
        await engine.stop()
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


def test_a_dead_engine_can_be_stopped(ask: Any, with_engine: Any) -> None:
    async def work(engine: SimEngine) -> None:
        with pytest.raises(EngineDied):
            await collect(engine.generate(ask()))
        await engine.stop()

    with_engine(work, die_after_tokens=0)


def test_stopping_the_engine_ends_the_requests_that_run_and_wait_with_an_error(ask: Any, with_engine: Any) -> None:
    async def work(engine: SimEngine) -> None:
        readers = [asyncio.create_task(collect(engine.generate(ask(max_tokens=1000)))) for _ in range(2)]
        await asyncio.sleep(0.1)
        await engine.stop()
        outcomes = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), 60)
        assert [type(outcome) for outcome in outcomes] == [EngineDied] * 2

    with_engine(work, max_sequences=1)


def test_a_stopped_engine_takes_no_requests_and_does_not_say_that_it_is_well(ask: Any, with_engine: Any) -> None:
    async def work(engine: SimEngine) -> None:
        await engine.stop()
        with pytest.raises(EngineDied):
            await engine.load()
        with pytest.raises(EngineDied):
            await asyncio.wait_for(collect(engine.generate(ask())), 60)

    with_engine(work)
