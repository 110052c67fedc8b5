"""The account of a request adds up whatever was measured, and what is unknown stays unknown.

Times lie on a grid of 1/1024 s, on which sums of floats are exact.
"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.messages import ChoiceMetrics, RequestMetrics, Stage
from serve_app.telemetry import names
from serve_app.telemetry.account import account, parts
from serve_app.telemetry.stages import Work, stage

BASE_S = 1_700_000_000.0
REQUEST = RequestMetrics("r", "chat", "m", True, BASE_S, BASE_S + 2, 200, "ok")

moments = st.integers(-2_000, 6_000).map(lambda ticks: BASE_S + ticks / 1024)
lengths = st.integers(0, 2_000).map(lambda ticks: ticks / 1024)
stage_names = st.sampled_from(names.STAGES)


@st.composite
def plain_stages(draw: st.DrawFn) -> Stage:
    begin_s = draw(moments)
    return stage(draw(stage_names), begin_s, begin_s + draw(lengths))


@st.composite
def summed_stages(draw: st.DrawFn) -> Stage:
    work, now_s = Work(draw(stage_names)), draw(moments)
    for ticks in draw(st.lists(st.integers(0, 50), min_size=1, max_size=60)):
        work.add(now_s, now_s + ticks / 1024)
        now_s += (ticks + draw(st.integers(0, 20))) / 1024
    (one,) = work.stages()
    return one


# Several choices have several stages of one name.
any_stages = st.lists(plain_stages() | summed_stages(), max_size=10).map(tuple)


def changed(**fields: object) -> RequestMetrics:
    return msgspec.structs.replace(REQUEST, **fields)


@given(any_stages, moments, moments)
def test_parts_add_up_to_the_wall_time_and_none_is_negative(
    stages: tuple[Stage, ...], arrived_s: float, ended_s: float
) -> None:
    what = account(changed(stages=stages, arrived_s=arrived_s, ended_s=ended_s))
    assert what.e2e_s == max(0.0, ended_s - arrived_s)
    assert sum(what.parts.values()) == what.e2e_s
    assert all(seconds >= 0 for seconds in what.parts.values())
    assert set(what.parts) <= {*names.STAGES, names.UNACCOUNTED}
    assert what.unaccounted_s == what.parts[names.UNACCOUNTED]


@given(st.lists(st.builds(lambda n, b, e: stage(n, b, b + e), stage_names, st.floats(0, 9), st.floats(0, 9))))
def test_parts_add_up_off_the_grid_as_well_as_floats_do(stages: list[Stage]) -> None:
    seconds = parts(tuple(stages), 1.0, 7.3)
    assert sum(seconds.values()) == pytest.approx(6.3, abs=1e-9)
    assert all(one >= 0 for one in seconds.values())


spans = st.tuples(stage_names, st.integers(-4, 24), st.integers(0, 12))


@given(st.lists(spans, max_size=8), st.integers(0, 20))
def test_each_instant_belongs_to_the_busy_stage_nearest_the_client(
    measured: list[tuple[str, int, int]], wall_s: int
) -> None:
    """Against the plainest way to say it: second by second."""
    expected: dict[str, int] = {}
    for second in range(wall_s):
        busy = [name for name, begin, length in measured if begin <= second < begin + length]
        owner = max(busy, key=names.STAGES.index, default=names.UNACCOUNTED)
        expected[owner] = expected.get(owner, 0) + 1
    stages = tuple(stage(name, BASE_S + begin, BASE_S + begin + length) for name, begin, length in measured)
    seconds = parts(stages, BASE_S, BASE_S + wall_s)
    assert {name: one for name, one in seconds.items() if one} == expected


def test_parts_stand_in_the_order_of_the_path() -> None:
    stages = (stage(names.WRITE, BASE_S + 1, BASE_S + 2), stage(names.AUTH, BASE_S, BASE_S + 0.5))
    assert list(parts(stages, BASE_S, BASE_S + 2)) == [names.AUTH, names.WRITE, names.UNACCOUNTED]


def test_what_lies_outside_the_request_counts_for_nothing() -> None:
    stages = (stage(names.READ, BASE_S - 2, BASE_S - 1), stage(names.WRITE, BASE_S + 1.5, BASE_S + 9))
    assert parts(stages, BASE_S, BASE_S + 2) == {names.WRITE: 0.5, names.UNACCOUNTED: 1.5}


def test_choices_that_decode_at_the_same_time_share_the_time() -> None:
    stages = (stage(names.DECODE, BASE_S, BASE_S + 1), stage(names.DECODE, BASE_S + 0.5, BASE_S + 1.5))
    assert parts(stages, BASE_S, BASE_S + 2) == {names.DECODE: 1.5, names.UNACCOUNTED: 0.5}


def per_token(name: str, tokens: int, piece_s: float, every_s: float) -> Stage:
    work = Work(name)
    for at in range(tokens):
        work.add(BASE_S + at * every_s, BASE_S + at * every_s + piece_s)
    (one,) = work.stages()
    return one


def test_short_pieces_whose_place_is_forgotten_are_taken_from_the_decode() -> None:
    detokenize = per_token(names.DETOKENIZE, 64, 1 / 1024, 1 / 64)
    seconds = parts((stage(names.DECODE, BASE_S, BASE_S + 1), detokenize), BASE_S, BASE_S + 1.5)
    assert seconds == {names.DECODE: 1 - 64 / 1024, names.DETOKENIZE: 64 / 1024, names.UNACCOUNTED: 0.5}


def test_without_a_decode_they_are_taken_from_what_is_unaccounted() -> None:
    seconds = parts((per_token(names.WRITE, 64, 1 / 1024, 1 / 64),), BASE_S, BASE_S + 1)
    assert seconds == {names.WRITE: 64 / 1024, names.UNACCOUNTED: 1 - 64 / 1024}


def test_they_never_take_more_than_there_is() -> None:
    much = Stage(names.WRITE, BASE_S, BASE_S + 1, 500.0, 40, 0.25, ((BASE_S, BASE_S + 0.25),))
    assert parts((much,), BASE_S, BASE_S + 1) == {names.WRITE: 1.0, names.UNACCOUNTED: 0.0}


# What a client waited for.


def test_where_it_streams_the_first_token_is_the_first_byte_that_was_written() -> None:
    choices = (ChoiceMetrics(2, BASE_S + 0.25, BASE_S + 1),)
    assert account(changed(first_write_s=BASE_S + 0.5, choices=choices)).ttft_s == 0.5


def test_where_it_does_not_stream_it_is_the_earliest_that_the_engine_made() -> None:
    choices = (ChoiceMetrics(2, BASE_S + 0.75, BASE_S + 1), ChoiceMetrics(2, BASE_S + 0.25, BASE_S + 1))
    assert account(changed(stream=False, first_write_s=BASE_S + 2, choices=choices)).ttft_s == 0.25


@pytest.mark.parametrize("stream", [True, False])
def test_without_a_first_token_its_time_is_unknown(stream: bool) -> None:
    what = account(changed(stream=stream, choices=(ChoiceMetrics(0),)))
    assert (what.ttft_s, what.tpot_s, what.longest_gap_s) == (None, None, None)
    assert account(changed(stream=stream)).ttft_s is None


@pytest.mark.parametrize("stream", [True, False])
def test_a_first_token_before_the_arrival_is_no_negative_time(stream: bool) -> None:
    early = changed(stream=stream, first_write_s=BASE_S - 1, choices=(ChoiceMetrics(2, BASE_S - 1, BASE_S - 2),))
    assert (account(early).ttft_s, account(early).tpot_s) == (0.0, 0.0)


@pytest.mark.parametrize("tokens", [0, 1])
def test_the_time_per_token_is_unknown_below_two_tokens(tokens: int) -> None:
    assert account(changed(choices=(ChoiceMetrics(tokens, BASE_S, BASE_S + 1),))).tpot_s is None


def test_the_time_per_token_is_the_mean_over_the_gaps_of_all_choices() -> None:
    choices = (
        ChoiceMetrics(5, BASE_S, BASE_S + 1),
        ChoiceMetrics(3, BASE_S, BASE_S + 0.5),
        ChoiceMetrics(1, BASE_S, BASE_S + 0.25),
        ChoiceMetrics(9, BASE_S, None),
    )
    assert account(changed(choices=choices)).tpot_s == 1.5 / 6


def test_the_longest_gap_is_that_of_any_choice() -> None:
    choices = (ChoiceMetrics(5, longest_gap_s=0.25), ChoiceMetrics(5, longest_gap_s=0.75), ChoiceMetrics(1))
    assert account(changed(choices=choices)).longest_gap_s == 0.75


@pytest.mark.parametrize(("tokens", "length"), [(None, "unknown"), (0, "short"), (199, "short"), (200, "medium")])
def test_the_length_is_the_prompts_and_unknown_where_it_was_not_counted(tokens: int | None, length: str) -> None:
    assert account(changed(prompt_tokens=tokens)).length == length


def test_a_stage_that_is_not_known_here_is_left_out() -> None:
    newer = Stage("speculation", 1.0, 4.0, 3.0, 1, 3.0)
    assert parts((newer, Stage(names.PREFILL, 0.0, 1.0, 1.0, 1, 1.0)), 0.0, 5.0) == {
        names.PREFILL: 1.0,
        names.UNACCOUNTED: 4.0,
    }
