"""What is written of a benchmark can be read again, and the tables of both have all their parts."""

import json
from collections.abc import Callable

import pytest
from bench import channel, peers, summary
from bench.measure import Failure, Idle, Measurement
from bench.report import Report, encode

Make = Callable[..., Measurement]


@pytest.fixture
def report(make: Make) -> Report:
    rounds = [make("vllm", 0, 8), make("tokenline", 0, 8, tokens_per_s=123.456789)]
    rests = [Idle("tokenline", 0, 10.0, {"gateway": 0.1})]
    return Report(
        benchmark="peers",
        machine={"cores": 2},
        versions={"tokenline": {"ray": "2.60.0"}},
        settings={"rounds": 1},
        summary=summary.summary(rounds),
        ratios={"vllm": summary.ratios(rounds, "vllm"), "streams": {}, "fewest": summary.growth(rounds)},
        idle=summary.idle(rests),
        failures=[Failure("ray-llm", 0, "NotReady: no chat")],
        rounds=rounds,
        rests=rests,
    )


def test_it_is_json_with_every_round(report: Report) -> None:
    found = json.loads(encode(report))
    assert found["summary"]["tokenline"]["8"]["tokens/s"] == {"median": 123.5, "low": 123.5, "high": 123.5, "rounds": 1}
    assert [one["system"] for one in found["rounds"]] == ["vllm", "tokenline"]
    assert found["failures"] == [{"system": "ray-llm", "round": 0, "error": "NotReady: no chat"}]


def test_a_round_has_a_line(report: Report) -> None:
    assert sum(line.startswith(b'{"system"') for line in encode(report).splitlines()) == 4


@pytest.mark.parametrize("markdown", [peers.markdown, channel.markdown])
def test_the_tables_tell_speed_cost_rest_and_failures(report: Report, markdown: Callable[[Report], str]) -> None:
    text = markdown(report)
    for heading in ("### Speed", "### CPU-seconds per 1,000 tokens", "### Divided by", "### At rest", "### Failures"):
        assert heading in text
    assert "ray-llm, round 1: NotReady: no chat" in text
