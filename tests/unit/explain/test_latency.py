from collections.abc import Callable

from serve_app.explain.explain import explain
from serve_app.explain.symptom import TPOT_BOUND_S, Symptom
from serve_app.messages import RequestMetrics
from serve_app.telemetry import names

Make = Callable[..., RequestMetrics]


def symptom(requests: list[RequestMetrics], name: str) -> Symptom | None:
    return next((one for one in explain(requests).symptoms if one.name == name), None)


def test_a_first_token_over_its_bound_is_blamed_on_the_late_requests_own_layer(make: Make) -> None:
    # The others' decode is the larger sum; only the late ones wait in the queue.
    requests = [make(decode=3.0) for _ in range(18)] + [make(engine__queue=2.5, decode=3.0) for _ in range(2)]
    found = symptom(requests, "slow first token")
    assert found is not None
    assert (found.over_bound, found.layer) == (True, names.ENGINE_QUEUE)
    assert "2,000 ms" in found.evidence


def test_a_first_token_within_its_bound_only_says_where_to_look(make: Make) -> None:
    found = symptom([make(prefill=1.0)], "slow first token")
    assert found is not None
    assert (found.over_bound, found.layer) == (False, names.PREFILL)


def test_a_first_token_that_is_the_smaller_part_of_the_wait_is_no_symptom(make: Make) -> None:
    assert symptom([make(decode=1.0)], "slow first token") is None


def test_a_slow_length_is_found_though_the_mix_hides_it(make: Make) -> None:
    requests = [make(decode=1.0) for _ in range(99)] + [make(prefill=4.0, decode=1.0, prompt_tokens=5000)]
    found = symptom(requests, "slow first token")
    assert found is not None
    assert (found.over_bound, found.layer) == (True, names.PREFILL)
    assert found.evidence.startswith("long prompts: P95 TTFT")


def test_slow_tokens_are_blamed_on_the_decode(make: Make) -> None:
    found = symptom([make(decode=20 * TPOT_BOUND_S * 1.5)], "slow tokens")
    assert found is not None
    assert (found.over_bound, found.layer) == (True, names.DECODE)
    assert "P95 TPOT 300 ms is over 200 ms" in found.evidence


def test_slow_tokens_are_blamed_on_the_write_where_that_is_the_larger_part(make: Make) -> None:
    found = symptom([make(gateway__write=0.8)], "slow tokens")
    assert found is not None
    assert (found.over_bound, found.layer) == (False, names.WRITE)


def test_tokens_that_are_the_smaller_part_of_the_wait_are_no_symptom(make: Make) -> None:
    assert symptom([make(prefill=1.0)], "slow tokens") is None


def test_everything_slow_in_one_hop_has_one_cause(make: Make) -> None:
    found = symptom([make(engine__queue=3.0, decode=10.0)], "slow everything")
    assert found is not None
    assert found.layer == names.DECODE
    assert "one cause, the engine: before the first token engine.queue, after it decode" in found.evidence


def test_everything_slow_between_the_hops_is_named_so(make: Make) -> None:
    slow = make(gap=5.0)
    late = {"ended_s": slow.ended_s + 6.0, "choices": ()}
    tokens = slow.choices[0]
    moved = type(tokens)(tokens.tokens, tokens.first_token_s, slow.ended_s + 6.0)
    found = symptom([make(gap=5.0, fields=late | {"choices": (moved,)})], "slow everything")
    assert found is not None
    assert found.layer == names.UNACCOUNTED
    assert "one cause, the way between the hops" in found.evidence


def test_everything_slow_in_two_hops_names_both(make: Make) -> None:
    found = symptom([make(tokenizer__encode=9.0, decode=10.0)], "slow everything")
    assert found is not None
    assert found.layer == names.DECODE
    assert "no one hop: before the first token it is tokenizer.encode, after it decode" in found.evidence


def test_every_length_slow_is_everything_slow(make: Make) -> None:
    short = [make(prefill=3.0) for _ in range(95)]
    long = [make(decode=9.0, prompt_tokens=5000) for _ in range(5)]
    found = symptom(short + long, "slow everything")
    assert found is not None
    assert "every length" in found.evidence


def test_a_slow_first_token_at_every_length_is_not_everything(make: Make) -> None:
    short = [make(prefill=3.0) for _ in range(5)]
    long = [make(prefill=4.0, prompt_tokens=5000) for _ in range(5)]
    assert symptom(short + long, "slow everything") is None


def test_one_slow_length_is_not_everything(make: Make) -> None:
    short = [make() for _ in range(95)]
    long = [make(prefill=3.0, decode=9.0, prompt_tokens=5000) for _ in range(5)]
    assert symptom(short + long, "slow everything") is None


def test_requests_without_a_token_have_neither_symptom(make: Make) -> None:
    requests = [make(fields={"choices": (), "first_write_s": None})]
    assert explain(requests).symptoms == ()
