"""What a window keeps of the answers that reach into it."""

import pytest
from bench.client import Answer
from bench.figures import figures, percentiles


def test_percentiles_lie_between_values_by_their_distance() -> None:
    assert percentiles([4.0, 1.0, 3.0, 2.0, 5.0]) == pytest.approx({"p50": 3.0, "p90": 4.6, "p99": 4.96})


def test_no_values_have_no_percentiles() -> None:
    assert percentiles([]) == {}


def test_one_value_is_every_percentile() -> None:
    assert percentiles([7.0]) == {"p50": 7.0, "p90": 7.0, "p99": 7.0}


def test_times_of_one_request() -> None:
    seen = figures([Answer(sent_s=10.0, event_s=[10.5, 10.6, 10.8], end_s=10.9, tokens=3)], 10.0, 11.0)
    assert seen.tokens_per_s == pytest.approx(3.0)
    assert seen.ttft_ms["p50"] == pytest.approx(500)
    assert seen.tpot_ms["p50"] == pytest.approx(150)
    assert seen.itl_ms["p50"] == pytest.approx(150)
    assert seen.itl_ms["p99"] == pytest.approx(199)
    assert (seen.requests, seen.failures, seen.events_per_token) == (1, {}, 1.0)


def test_tokens_that_came_together_count_each() -> None:
    seen = figures([Answer(10.0, [10.2, 10.4], 10.5, tokens=8)], 10.0, 12.0)
    assert seen.tokens == pytest.approx(8)
    assert seen.events_per_token == pytest.approx(0.25)
    assert seen.tpot_ms["p50"] == pytest.approx(200 / 7)


def test_only_what_lies_in_the_window_counts() -> None:
    across_the_begin = Answer(9.0, [9.5, 10.5], 10.6, tokens=2)
    across_the_end = Answer(11.8, [11.9, 12.5], 12.6, tokens=2)
    seen = figures([across_the_begin, across_the_end], 10.0, 12.0)
    assert seen.tokens == pytest.approx(2)
    assert seen.requests == 1
    assert seen.ttft_ms["p99"] == pytest.approx(100)
    assert seen.tpot_ms["p99"] == pytest.approx(1000)
    assert seen.itl_ms == {}


def test_failures_are_counted_by_reason_and_lend_no_times() -> None:
    answers = [
        Answer(10.0, [], 10.1, 0, "status 503"),
        Answer(10.2, [], 10.3, 0, "status 503"),
        Answer(10.0, [10.5, 11.0], 11.5, 0, "no [DONE]"),
    ]
    seen = figures(answers, 10.0, 12.0)
    assert seen.failures == {"status 503": 2, "no [DONE]": 1}
    assert (seen.ttft_ms, seen.tpot_ms, seen.itl_ms) == ({}, {}, {})
    assert seen.tokens == pytest.approx(2)
    assert seen.events_per_token is None
