"""Stages as they are measured: never negative, summed exactly, and on the caller's clock inside the caller's wait.

Times lie on a grid of 1/1024 s, on which sums of floats are exact.
"""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.messages import EngineTimes, RequestContext, Stage
from serve_app.telemetry import names
from serve_app.telemetry.stages import Work, aligned, engine_stages, queue_stage, stage

BASE_S = 1_700_000_000.0
KEPT = 16

moments = st.integers(-5_000, 5_000).map(lambda ticks: BASE_S + ticks / 1024)
lengths = st.integers(0, 3_000).map(lambda ticks: ticks / 1024)


def context(sent_s: float | None) -> RequestContext:
    return RequestContext("r", BASE_S + 600, sent_s=sent_s)


def check(one: Stage) -> None:
    assert one.begin_s <= one.end_s
    assert 0 <= one.longest_s <= one.busy_s <= one.end_s - one.begin_s
    assert all(one.begin_s <= begin <= end <= one.end_s for begin, end in one.pieces)


@given(moments, moments)
def test_a_stage_is_as_long_as_it_was_and_never_negative(begin_s: float, end_s: float) -> None:
    one = stage("x", begin_s, end_s)
    check(one)
    assert one == Stage("x", begin_s, max(begin_s, end_s), max(0.0, end_s - begin_s), 1, max(0.0, end_s - begin_s))


def test_a_stage_without_an_end_ends_now() -> None:
    before_s = time.time()
    one = stage("x", before_s)
    assert before_s <= one.end_s <= time.time()


@given(st.none() | moments, moments)
def test_a_queue_lasts_from_the_sending_to_the_begin(sent_s: float | None, begun_s: float) -> None:
    one = queue_stage("q", context(sent_s), begun_s)
    check(one)
    assert one.end_s == begun_s
    assert one.busy_s == (0.0 if sent_s is None else max(0.0, begun_s - sent_s))


# Summed work.


def test_no_work_is_no_stage() -> None:
    assert Work("w").stages() == ()


@given(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=80))
def test_work_is_summed_exactly_and_keeps_its_longest_pieces_only(gaps_and_lengths: list[tuple[float, float]]) -> None:
    work, now_s, pieces = Work("w"), BASE_S, []
    for gap_s, length_s in gaps_and_lengths:
        pieces.append((now_s + gap_s, now_s + gap_s + length_s))
        work.add(*pieces[-1])
        now_s = pieces[-1][1]
    (one,) = work.stages()
    check(one)
    of = [end - begin for begin, end in pieces]
    assert (one.begin_s, one.end_s, one.count) == (pieces[0][0], pieces[-1][1], len(pieces))
    assert (one.busy_s, one.longest_s) == (sum(of), max(of))
    assert len(one.pieces) == min(len(pieces), KEPT)
    assert set(one.pieces) <= set(pieces)
    assert sorted(end - begin for begin, end in one.pieces) == sorted(of)[-KEPT:]
    assert list(one.pieces) == sorted(one.pieces)


def test_a_piece_whose_end_is_before_its_begin_counts_as_nothing() -> None:
    work = Work("w")
    work.add(BASE_S, BASE_S - 1)
    work.add(BASE_S + 1, BASE_S + 2)
    (one,) = work.stages()
    check(one)
    assert (one.count, one.busy_s) == (2, 1.0)


@pytest.mark.parametrize("order", [1, -1])
def test_it_is_the_longest_pieces_that_are_kept_whenever_they_came(order: int) -> None:
    work = Work("w")
    for at, ticks in enumerate(range(1, 41)[::order]):
        work.add(BASE_S + at, BASE_S + at + ticks / 1024)
    (one,) = work.stages()
    assert sorted(round((end - begin) * 1024) for begin, end in one.pieces) == list(range(25, 41))


@given(st.integers(17, 2_000))
def test_what_is_kept_does_not_grow_with_the_work(count: int) -> None:
    work = Work("w")
    for at in range(count):
        work.add(BASE_S + at, BASE_S + at + 0.5)
    (one,) = work.stages()
    assert (one.count, one.busy_s, len(one.pieces)) == (count, count / 2, KEPT)


# Another machine's clock.


@st.composite
def stages_of_a_hop(draw: st.DrawFn) -> tuple[Stage, ...]:
    made = []
    for name in draw(st.lists(st.sampled_from(names.STAGES), min_size=1, max_size=5)):
        begin_s = draw(moments)
        if draw(st.booleans()):
            made.append(stage(name, begin_s, begin_s + draw(lengths)))
            continue
        work = Work(name)
        for length_s in draw(st.lists(lengths, min_size=1, max_size=20)):
            work.add(begin_s, begin_s + length_s)
            begin_s += length_s
        made += work.stages()
    return tuple(made)


@given(stages_of_a_hop(), moments, lengths)
def test_aligned_stages_lie_inside_the_call_and_are_never_negative(
    stages: tuple[Stage, ...], sent_s: float, call_s: float
) -> None:
    moved = aligned(stages, sent_s, sent_s + call_s)
    assert [(one.name, one.count, len(one.pieces)) for one in moved] == [
        (one.name, one.count, len(one.pieces)) for one in stages
    ]
    for before, after in zip(stages, moved, strict=True):
        check(after)
        assert sent_s <= after.begin_s
        assert after.end_s <= sent_s + call_s
        assert after.busy_s <= before.busy_s


@given(stages_of_a_hop(), lengths, lengths)
def test_stages_that_fit_are_left_alone(stages: tuple[Stage, ...], before_s: float, after_s: float) -> None:
    sent_s = min(one.begin_s for one in stages) - before_s
    received_s = max(one.end_s for one in stages) + after_s
    assert aligned(stages, sent_s, received_s) is stages
    assert aligned((), sent_s, received_s) == ()


@given(stages_of_a_hop(), st.integers(-9_000, 9_000))
def test_a_clock_that_is_off_by_any_amount_costs_no_stage_its_length(stages: tuple[Stage, ...], ticks: int) -> None:
    """The call lasts as long as the stages; the other machine's clock shows another time."""
    sent_s = min(one.begin_s for one in stages) + ticks / 1024
    received_s = max(one.end_s for one in stages) + ticks / 1024
    moved = aligned(stages, sent_s, received_s)
    assert [one.busy_s for one in moved] == [one.busy_s for one in stages]
    assert [one.end_s - one.begin_s for one in moved] == [one.end_s - one.begin_s for one in stages]
    assert [one.begin_s for one in moved] == [one.begin_s + ticks / 1024 for one in stages]


def test_a_queue_still_begins_with_its_sender_where_the_other_clock_is_ahead() -> None:
    ahead_s = 3.0
    queue = queue_stage("q", context(BASE_S), BASE_S + 0.25 + ahead_s)
    work = stage("w", BASE_S + 0.25 + ahead_s, BASE_S + 1 + ahead_s)
    moved = aligned((queue, work), BASE_S, BASE_S + 1)
    assert [(one.begin_s, one.end_s) for one in moved] == [(BASE_S, BASE_S + 0.25), (BASE_S + 0.25, BASE_S + 1)]
    assert moved[0].busy_s == 0.25


def test_a_clock_that_is_behind_is_moved_forward() -> None:
    behind_s = 3.0
    queue = queue_stage("q", context(BASE_S), BASE_S + 0.25 - behind_s)
    work = stage("w", BASE_S + 0.25 - behind_s, BASE_S + 0.75 - behind_s)
    moved = aligned((queue, work), BASE_S, BASE_S + 1)
    assert [(one.begin_s, one.end_s) for one in moved] == [(BASE_S, BASE_S), (BASE_S, BASE_S + 0.5)]


def test_what_is_longer_than_the_call_is_cut_to_it() -> None:
    """A clock that was set during the call: there is no room for all of it."""
    (moved,) = aligned((stage("w", BASE_S - 1, BASE_S + 1),), BASE_S, BASE_S + 1.5)
    assert (moved.begin_s, moved.end_s, moved.busy_s) == (BASE_S, BASE_S + 1.5, 1.5)


def test_a_call_that_ended_before_it_was_sent_has_no_negative_stages() -> None:
    for one in aligned((stage("w", BASE_S, BASE_S + 1),), BASE_S + 5, BASE_S):
        check(one)


# The engine's phases.

TIMES = ("queued_s", "scheduled_s", "first_token_s", "last_token_s")


@pytest.mark.parametrize("known", [set(some) for size in range(5) for some in itertools.combinations(TIMES, size)])
@pytest.mark.parametrize("sent_s", [BASE_S, None])
def test_phases_follow_each_other_whatever_is_unknown(known: set[str], sent_s: float | None) -> None:
    times = EngineTimes(**{name: BASE_S + 1 + at for at, name in enumerate(TIMES) if name in known})
    stages = engine_stages(context(sent_s), times, BASE_S + 9)
    for one in stages:
        check(one)
    expected = [names.ENGINE_QUEUE]
    expected += [names.PREFILL] if "scheduled_s" in known else []
    expected += [names.DECODE] if "first_token_s" in known else []
    assert [one.name for one in stages] == expected
    if sent_s is not None:
        assert stages[0].begin_s == sent_s
        assert all(one.end_s == following.begin_s for one, following in itertools.pairwise(stages))
        assert stages[-1].end_s == (times.last_token_s or BASE_S + 9)
        assert sum(one.busy_s for one in stages) == stages[-1].end_s - sent_s


def test_without_any_times_all_of_it_was_the_queue() -> None:
    assert engine_stages(context(BASE_S), None, BASE_S + 2) == (stage(names.ENGINE_QUEUE, BASE_S, BASE_S + 2),)


@given(st.builds(EngineTimes, *[st.none() | moments] * 4), st.none() | moments, moments)
def test_phases_are_never_negative_whatever_the_clocks_say(
    times: EngineTimes, sent_s: float | None, ended_s: float
) -> None:
    for one in engine_stages(context(sent_s), times, ended_s):
        check(one)
