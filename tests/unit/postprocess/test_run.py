"""One running choice: what is measured of its tokens and phases, whole, stopped, failed, or never begun.

Times lie on a grid of 1/8 s, on which sums of floats are exact.
"""

from typing import Any

import pytest

from serve_app.messages import (
    ChoiceMetrics,
    EngineDelta,
    EngineRequest,
    EngineTimes,
    RequestContext,
    Sampling,
    TokenLogprob,
)
from serve_app.postprocess.choice import Choice, Update
from serve_app.postprocess.render import Echo
from serve_app.postprocess.run import Run
from serve_app.telemetry.names import DECODE, ENGINE_QUEUE, PREFILL
from serve_app.telemetry.stages import stage
from serve_app.vocabulary import Vocabulary

SENT_S = 1_000_000.0
# As both engines say it: the first delta's last token is its first.
FIRST = EngineTimes(SENT_S + 1, SENT_S + 2, SENT_S + 3, SENT_S + 3)
LAST = EngineTimes(SENT_S + 1, SENT_S + 2, SENT_S + 3, SENT_S + 8)


@pytest.fixture
def make(byte_vocabulary: Vocabulary) -> Any:
    def run(stop: tuple[str, ...] = (), echo_text: str | None = None, sent_s: float | None = SENT_S) -> Run:
        context = RequestContext("r", SENT_S + 60, sent_s=sent_s)
        request = EngineRequest(context, "r-0", (112, 113), 8, Sampling())
        return Run(Choice(4, byte_vocabulary, (112, 113), stop, Sampling()), request, echo_text)

    return run


def feed(run: Run, text: bytes, reason: Any = None, times: EngineTimes | None = None, every_s: float = 1.0) -> None:
    """The text byte by byte, the first at 3.125 s; then what the service does with it, until a finish reason."""
    for position, byte in enumerate(text):
        last = position == len(text) - 1
        delta = EngineDelta(
            (byte,), reason if last else None, times=times if last and reason else None if position else FIRST
        )
        run.arrived(delta, SENT_S + 3.125 + position * every_s)
        update = run.choice.push(delta)
        run.collect(update)
        run.finish_reason = update.finish_reason
        if update.finish_reason is not None:
            return


def phases(run: Run, now_s: float) -> list[tuple[str, float, float]]:
    return [(one.name, one.begin_s - SENT_S, one.end_s - SENT_S) for one in run.stages(SENT_S + now_s)]


def test_a_whole_choice_lasted_from_its_first_token_to_its_last_as_the_engine_made_them(make: Any) -> None:
    run = make()
    feed(run, b"hello", "length", LAST)
    assert phases(run, 20) == [(ENGINE_QUEUE, 0, 2), (PREFILL, 2, 3), (DECODE, 3, 8)]
    assert run.metrics(SENT_S + 20) == ChoiceMetrics(5, SENT_S + 3, SENT_S + 8, 1.0, "length", False)


def test_a_choice_that_a_stop_string_ended_lasted_until_its_last_delta(make: Any) -> None:
    run = make(stop=("lo",))
    feed(run, b"hello world", "length", LAST)
    assert run.text == "hel"
    assert phases(run, 20) == [(ENGINE_QUEUE, 0, 2), (PREFILL, 2, 3), (DECODE, 3, 7.125)]
    assert run.metrics(SENT_S + 20) == ChoiceMetrics(5, SENT_S + 3, SENT_S + 7.125, 1.0, "stop", True)


def test_a_choice_that_failed_was_decoding_until_then_but_its_last_token_is_older(make: Any) -> None:
    run = make()
    feed(run, b"hel")
    assert phases(run, 20)[-1] == (DECODE, 3, 20)
    assert run.metrics(SENT_S + 20) == ChoiceMetrics(3, SENT_S + 3, SENT_S + 5.125, 1.0, None, False)


def test_an_end_of_sequence_is_no_stop_string(make: Any) -> None:
    run = make(stop=("never",))
    feed(run, b"hi", "stop", LAST)
    metrics = run.metrics(SENT_S + 20)
    assert (metrics.finish_reason, metrics.stop_string) == ("stop", False)


def test_without_a_token_all_of_it_was_the_queue_and_the_tokens_times_are_unknown(make: Any) -> None:
    run = make()
    assert phases(run, 5) == [(ENGINE_QUEUE, 0, 5)]
    assert run.metrics(SENT_S + 5) == ChoiceMetrics(0)


def test_an_engine_that_tells_no_times_leaves_them_unknown(make: Any) -> None:
    run = make()
    for at in (1, 2):
        run.arrived(EngineDelta((97,)), SENT_S + at)
        run.choice.push(EngineDelta((97,)))
    metrics = run.metrics(SENT_S + 3)
    assert (metrics.tokens, metrics.first_token_s, metrics.last_token_s) == (2, None, None)
    assert metrics.longest_gap_s == 1.0


@pytest.mark.parametrize(("moments", "longest_s"), [([1], None), ([1, 1], 0.0), ([1, 2, 5, 6], 3.0), ([1, 9, 10], 8.0)])
def test_the_longest_gap_lies_between_two_deltas(make: Any, moments: list[float], longest_s: float | None) -> None:
    run = make()
    for moment in moments:
        run.arrived(EngineDelta((97,)), SENT_S + moment)
    assert run.metrics(SENT_S + 20).longest_gap_s == longest_s


def test_a_single_delta_of_many_tokens_has_its_own_times(make: Any) -> None:
    run = make()
    delta = EngineDelta(tuple(b"hello"), "length", times=LAST)
    run.arrived(delta, SENT_S + 8.125)
    run.finish_reason = run.choice.push(delta).finish_reason
    assert run.metrics(SENT_S + 9) == ChoiceMetrics(5, SENT_S + 3, SENT_S + 8, None, "length", False)


@pytest.mark.parametrize("off_s", [-1000.0, 1000.0])
def test_another_machines_phases_lie_within_the_call(make: Any, off_s: float) -> None:
    run = make()
    times = EngineTimes(*[SENT_S + off_s + at for at in (1, 2, 3, 8)])
    delta = EngineDelta(tuple(b"hi"), "length", times=times)
    run.arrived(delta, SENT_S + 9)
    run.finish_reason = run.choice.push(delta).finish_reason
    for one in run.stages(SENT_S + 10):
        assert SENT_S <= one.begin_s <= one.end_s <= SENT_S + 10
    metrics = run.metrics(SENT_S + 10)
    assert SENT_S <= metrics.first_token_s <= metrics.last_token_s <= SENT_S + 10


def test_an_unknown_sender_costs_no_phase(make: Any) -> None:
    run = make(sent_s=None)
    feed(run, b"hi", "length", LAST)
    assert [one.name for one in run.stages(SENT_S + 10)] == [ENGINE_QUEUE, PREFILL, DECODE]
    assert run.stages(SENT_S + 10)[-1] == stage(DECODE, SENT_S + 3, SENT_S + 8)


def test_an_echo_comes_with_the_first_delta_only(make: Any) -> None:
    run = make(echo_text="pq")
    scored = (None, TokenLogprob(113, -1.0))
    first = EngineDelta((97,), prompt_logprobs=scored)
    assert run.arrived(first, SENT_S) == Echo("pq", ((112, None), (113, scored[1])))
    assert run.arrived(EngineDelta((98,)), SENT_S) is None
    assert make().arrived(first, SENT_S) is None


def test_cached_tokens_are_the_most_that_any_delta_said(make: Any) -> None:
    run = make()
    for cached in (0, 16, 0):
        run.arrived(EngineDelta((97,), cached_tokens=cached), SENT_S)
    assert run.cached_tokens == 16


def test_a_finished_choice_has_its_whole_text(make: Any) -> None:
    run = make(echo_text="pq")
    feed(run, b"hello", "length", LAST)
    finished = run.finished()
    assert (finished.index, finished.text, finished.finish_reason) == (4, "hello", "length")
    assert finished.echo == Echo("pq")


def test_what_is_not_collected_is_not_kept(make: Any) -> None:
    run = make()
    run.arrived(EngineDelta((97,)), SENT_S)
    assert run.text == ""
    run.collect(Update("a"))
    run.collect(Update("b"))
    assert run.text == "ab"
