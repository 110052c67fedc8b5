"""Medians, spreads and ratios over rounds."""

from collections.abc import Callable

import pytest
from bench.measure import Idle, Measurement
from bench.summary import CPU, ENGINE_CPU, SERVING_CPU, growth, idle, metrics, ratios, summary

Make = Callable[..., Measurement]


def test_cost_is_cpu_time_per_thousand_tokens_and_serving_is_all_but_the_engine(make: Make) -> None:
    named = metrics(make(tokens_per_s=100.0, cpu_s={"gateway": 1.0, "engine core": 5.0}))
    assert named["CPU: gateway"] == pytest.approx(1.0)
    assert named[ENGINE_CPU] == pytest.approx(5.0)
    assert named[SERVING_CPU] == pytest.approx(1.0)
    assert named[CPU] == pytest.approx(6.0)


def test_without_tokens_there_is_no_cost_per_token(make: Make) -> None:
    assert not any(name.startswith("CPU") for name in metrics(make(tokens_per_s=0.0)))


def test_the_median_of_rounds_has_its_spread(make: Make) -> None:
    rates = summary([make(number=number, tokens_per_s=rate) for number, rate in enumerate([100.0, 300.0, 110.0])])
    found = rates["tokenline"][8]["tokens/s"]
    assert (found.median, found.low, found.high, found.rounds) == (110.0, 100.0, 300.0, 3)


def test_a_ratio_is_taken_within_a_round(make: Make) -> None:
    slow_then_fast = [
        make("vllm", 0, tokens_per_s=100.0),
        make("tokenline", 0, tokens_per_s=90.0),
        make("vllm", 1, tokens_per_s=1000.0),
        make("tokenline", 1, tokens_per_s=900.0),
    ]
    found = ratios(slow_then_fast, "vllm")["tokenline"][8]["tokens/s"]
    assert (found.low, found.high, found.rounds) == (pytest.approx(0.9), pytest.approx(0.9), 2)


def test_a_round_without_the_baseline_has_no_ratio(make: Make) -> None:
    found = ratios([make("vllm", 0), make("tokenline", 0), make("tokenline", 1)], "vllm")
    assert found["tokenline"][8]["tokens/s"].rounds == 1
    assert ratios([make("tokenline")], "vllm") == {}


def test_growth_is_against_the_fewest_clients_of_the_same_round(make: Make) -> None:
    found = growth(
        [
            make("channel", 0, 16, cpu_s={"gateway": 1.0}),
            make("channel", 0, 256, cpu_s={"gateway": 0.5}),
            make("channel", 1, 16, cpu_s={"gateway": 2.0}),
            make("channel", 1, 256, cpu_s={"gateway": 1.0}),
        ]
    )
    assert found["channel"][256]["CPU: gateway"].low == pytest.approx(0.5)
    assert found["channel"][256]["CPU: gateway"].high == pytest.approx(0.5)
    assert found["channel"][16]["CPU: gateway"].median == 1.0


def test_rest_is_told_in_cores(make: Make) -> None:
    found = idle([Idle("tokenline", 0, 10.0, {"gateway": 1.0, "Ray: GCS": 0.5})])
    assert found["tokenline"]["gateway"].median == pytest.approx(0.1)
    assert found["tokenline"]["all"].median == pytest.approx(0.15)


def test_nothing_measured_comes_to_nothing() -> None:
    assert (summary([]), ratios([], "vllm"), growth([]), idle([])) == ({}, {}, {}, {})
