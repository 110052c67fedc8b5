from collections.abc import Callable

import pytest

from serve_app.explain.explain import explain
from serve_app.explain.symptom import Symptom
from serve_app.messages import RequestMetrics
from serve_app.telemetry import names

Make = Callable[..., RequestMetrics]

MINUTE = 60.0


def symptom(requests: list[RequestMetrics], name: str) -> Symptom | None:
    return next((one for one in explain(requests).symptoms if one.name == name), None)


def mixed(
    make: Make, queued_s: float = 0.4, alone: bool = True, stage: str = "engine__queue", **long: float
) -> list[RequestMetrics]:
    """Ten short requests behind ten long ones, and ten in a quiet hour."""
    beside = [make(at_s=at + 0.5, **{stage: queued_s}) for at in range(10)]
    longs = [make(at_s=at, prompt_tokens=5000, decode=2.0, **long) for at in range(10)]
    quiet = [make(at_s=3600.0 + at) for at in range(10)] if alone else []
    return beside + longs + quiet


@pytest.mark.parametrize("queue", [names.TOKENIZER_QUEUE, names.POSTPROCESS_QUEUE, names.ENGINE_QUEUE])
def test_short_requests_that_queue_behind_long_ones_are_head_of_line_blocking(queue: str, make: Make) -> None:
    found = symptom(mixed(make, stage=queue.replace(".", "__")), "slow only for short")
    assert found is not None
    assert found.layer == queue
    assert "the median is 400 ms there beside long ones and 1.0 ms without" in found.evidence
    assert found.levers


def test_without_a_quiet_hour_the_evidence_says_what_it_cannot_tell(make: Make) -> None:
    found = symptom(mixed(make, alone=False), "slow only for short")
    assert found is not None
    assert "may have another cause" in found.evidence


def test_a_queue_in_which_long_ones_wait_as_much_is_no_head_of_line_blocking(make: Make) -> None:
    assert symptom(mixed(make, engine__queue=8.0), "slow only for short") is None


def test_a_queue_that_short_ones_have_without_long_ones_too_is_no_head_of_line_blocking(make: Make) -> None:
    requests = mixed(make, alone=False) + [make(at_s=3600.0 + at, engine__queue=0.4) for at in range(10)]
    assert symptom(requests, "slow only for short") is None


def test_fast_short_requests_beside_long_ones_are_no_symptom(make: Make) -> None:
    assert symptom(mixed(make, queued_s=0.001), "slow only for short") is None


def test_four_short_requests_are_too_few_to_say(make: Make) -> None:
    assert symptom([*mixed(make)[:4], *mixed(make)[10:20]], "slow only for short") is None


def hour(make: Make, slower: dict[str, float], per_s: float = MINUTE) -> list[RequestMetrics]:
    """Thirty requests, the last ten with other stages."""
    return [make(at_s=at * per_s, **(slower if at >= 20 else {})) for at in range(30)]


def test_tokens_that_get_slower_over_the_window_are_a_drift(make: Make) -> None:
    found = symptom(hour(make, {"decode": 0.06}), "slow after hours")
    assert found is not None
    assert found.layer == names.DECODE
    assert "median TPOT is 1.5 times what it was 20 min before" in found.evidence
    assert "grew most, by 20.0 ms" in found.evidence


def test_a_first_token_that_gets_slower_over_the_window_is_a_drift(make: Make) -> None:
    found = symptom(hour(make, {"engine__queue": 0.1}), "slow after hours")
    assert found is not None
    assert found.layer == names.ENGINE_QUEUE
    assert "median TTFT" in found.evidence
    assert "TPOT" not in found.evidence


def test_an_even_hour_is_no_drift(make: Make) -> None:
    assert symptom(hour(make, {}), "slow after hours") is None


def test_a_slight_change_is_no_drift(make: Make) -> None:
    assert symptom(hour(make, {"decode": 0.044}), "slow after hours") is None


def test_half_a_minute_is_too_short_for_a_drift(make: Make) -> None:
    assert symptom(hour(make, {"decode": 0.08}, per_s=1.0), "slow after hours") is None


def test_more_long_requests_later_are_no_drift(make: Make) -> None:
    """Each length is as fast as it was; only their mix has changed."""
    early, late = {0, 1, 2, 3, 4}, {20, 21, 22, 23, 24}
    requests = [
        make(at_s=at * MINUTE, prompt_tokens=5000, prefill=0.5)
        if at in early | late | {25, 26, 27}
        else make(at_s=at * MINUTE)
        for at in range(30)
    ]
    assert symptom(requests, "slow after hours") is None


def test_requests_of_one_moment_have_no_drift(make: Make) -> None:
    assert symptom([make() for _ in range(30)], "slow after hours") is None
    assert symptom([make()], "slow after hours") is None
