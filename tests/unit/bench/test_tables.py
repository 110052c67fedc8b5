"""Numbers in Markdown."""

from collections.abc import Callable

import pytest
from bench.measure import Failure, Measurement
from bench.summary import Median, summary
from bench.tables import SPEED, cost_columns, failures, grid, idle_table, number, table

Make = Callable[..., Measurement]


@pytest.mark.parametrize(
    ("value", "text"), [(1248.4, "1,248"), (99.95, "100.0"), (36.04, "36.0"), (1.234, "1.23"), (0.0314, "0.031")]
)
def test_a_number_has_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_cells_are_aligned() -> None:
    assert grid(["a", "long"], [["longer", "b"]]) == "| a      | long |\n|--------|------|\n| longer | b    |"


def test_a_row_for_each_load_and_system_with_the_spread_of_its_rounds(make: Make) -> None:
    rounds = [make("vllm", number, clients) for number in (0, 1) for clients in (8, 1)]
    rounds.append(make("tokenline", 0, 8, tokens_per_s=200.0, ttft_ms={}))
    lines = table(summary(rounds), {"tokens/s": ["tokens/s"], "TTFT": ["TTFT p50"]}).splitlines()
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]] == [
        ["1", "vllm", "100 (100 to 100)", "20.0 (20.0 to 20.0)"],
        ["8", "vllm", "100 (100 to 100)", "20.0 (20.0 to 20.0)"],
        ["8", "tokenline", "200", "–"],
    ]


def test_every_column_of_speed_is_one_that_is_measured(make: Make) -> None:
    percentiles = {"p50": 1.0, "p90": 2.0, "p99": 3.0}
    one = make(ttft_ms=percentiles, tpot_ms=percentiles, itl_ms=percentiles)
    assert "–" not in table(summary([one]), SPEED)


def test_groups_that_cost_nothing_have_no_column(make: Make) -> None:
    found = cost_columns(summary([make(cpu_s={"insight": 0.0001, "engine core": 5.0, "HAProxy": 0.3})]))
    assert list(found) == ["HAProxy", "engine core"]


def test_rest_in_thousandths_of_a_core() -> None:
    text = idle_table({"tokenline": {"all": Median(0.15, 0.1, 0.2, 3), "Ray: GCS": Median(0.15, 0.1, 0.2, 3)}})
    assert text.splitlines()[2].replace(" ", "") == "|tokenline|150|150|"


def test_whatever_failed_is_told(make: Make) -> None:
    text = failures([make("vllm", 1, failures={"status 500": 3})], [Failure("ray-llm", 0, "NotReady: no chat")])
    assert text.splitlines() == [
        "- ray-llm, round 1: NotReady: no chat",
        "- vllm, round 2, 8 clients: 3 requests: status 500",
    ]


def test_that_nothing_failed_is_told_too(make: Make) -> None:
    assert failures([make()], []) == "No system and no request failed."
