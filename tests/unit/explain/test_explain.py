from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.explain.explain import Bucket, StagePart, explain
from serve_app.messages import ChoiceMetrics, RequestMetrics, Stage
from serve_app.telemetry import names

Make = Callable[..., RequestMetrics]

DELAYED = (names.TEMPLATE, names.ENCODE, names.ENGINE_QUEUE, names.PREFILL, names.DETOKENIZE, names.WRITE)


def stage_named(name: str, bucket: Bucket) -> StagePart:
    return next(part for part in bucket.stages if part.name == name)


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("layer", DELAYED)
def test_a_delay_of_300_ms_is_blamed_on_exactly_its_layer(layer: str, one: bool, make: Make) -> None:
    requests = [make(at_s=at, **{layer.replace(".", "__"): 0.3}) for at in range(1 if one else 20)]
    found = explain(requests, one_by_one=True)
    assert found.dominant == layer
    assert {waterfall.dominant for waterfall in found.waterfalls} == {layer}
    assert [symptom.layer for symptom in found.symptoms] == [layer]
    assert [known.name for known in found.layers] == [layer]
    assert stage_named(layer, found.buckets[0]).share > 0.75


def test_time_that_no_stage_covers_is_a_layer_too(make: Make) -> None:
    found = explain([make(gap=0.3)])
    assert found.dominant == names.UNACCOUNTED
    assert "between the hops" in found.layers[0].meaning
    assert found.unaccounted == pytest.approx(0.3 / 0.3625, rel=0.01)


def test_percentiles_and_shares_are_of_the_requests_parts(make: Make) -> None:
    requests = [make(prefill=seconds / 100) for seconds in range(1, 102)]
    everything = explain(requests).buckets[0]
    part = stage_named(names.PREFILL, everything)
    assert (part.seconds.p50, part.seconds.p95, part.seconds.p99) == pytest.approx((0.51, 0.96, 1.00))
    waits = [request.ended_s - request.arrived_s for request in requests]
    assert part.share == pytest.approx(sum(seconds / 100 for seconds in range(1, 102)) / sum(waits), rel=1e-6)
    assert everything.e2e_s is not None
    assert everything.e2e_s.p50 == pytest.approx(sorted(waits)[50])
    assert everything.ttft_s is not None
    assert everything.ttft_s.p50 == pytest.approx(0.517, abs=1e-4)
    assert everything.tpot_s is not None
    assert everything.tpot_s.p50 == pytest.approx(0.002, abs=1e-6)


def test_buckets_are_those_lengths_that_have_requests(make: Make) -> None:
    found = explain([make(prompt_tokens=tokens) for tokens in (10, 10, 5000, None)])
    assert [(bucket.name, bucket.requests) for bucket in found.buckets] == [
        ("all", 4),
        ("short", 2),
        ("long", 1),
        ("unknown", 1),
    ]


def test_outcomes_and_errors_are_counted_and_refusals_are_no_wait(make: Make, refused: Make) -> None:
    everything = explain([make(), make(), refused()]).buckets[0]
    assert everything.outcomes == {"ok": 2, "refused": 1}
    assert everything.errors == {"overloaded": 1}
    assert (everything.requests, everything.served) == (3, 2)
    assert all(part.requests == 2 for part in everything.stages)


def test_what_was_not_measured_is_unknown_and_never_zero(make: Make) -> None:
    bare = {"stages": (), "choices": (), "first_write_s": None, "prompt_tokens": None, "completion_tokens": None}
    found = explain([make(fields=bare)], one_by_one=True)
    everything, unknown = found.buckets
    assert unknown.name == "unknown"
    assert everything.ttft_s is None
    assert everything.tpot_s is None
    assert [part.name for part in everything.stages] == [names.UNACCOUNTED]
    assert found.symptoms == ()
    assert found.waterfalls[0].ttft_s is None
    assert found.waterfalls[0].prompt_tokens is None


def test_no_requests_explain_nothing() -> None:
    found = explain([])
    assert (found.buckets, found.dominant, found.begin_s, found.unaccounted) == ((), None, None, None)


def test_a_stage_of_another_version_counts_as_unaccounted(make: Make) -> None:
    known = make()
    begin_s = known.arrived_s + 0.0605
    ended = {"stages": (*known.stages, Stage("telepathy", begin_s, begin_s + 1, 1.0)), "ended_s": known.ended_s + 1}
    assert explain([make(fields=ended)]).dominant == names.UNACCOUNTED


def test_waterfalls_come_newest_last(make: Make) -> None:
    found = explain([make(at_s=9.0), make(at_s=1.0)], one_by_one=True)
    assert [one.arrived_s for one in found.waterfalls] == [1_700_000_001.0, 1_700_000_009.0]


moments = st.floats(1_700_000_000, 1_700_010_000) | st.sampled_from([0.0, 1_700_000_000.0])
stages = st.builds(
    Stage,
    name=st.sampled_from(names.STAGES) | st.text(max_size=5),
    begin_s=moments,
    end_s=moments,
    busy_s=st.floats(0, 1e5),
    count=st.integers(0, 1000),
    longest_s=st.floats(0, 1e5),
    pieces=st.lists(st.tuples(moments, moments), max_size=3).map(tuple),
)
choices = st.builds(
    ChoiceMetrics,
    tokens=st.integers(0, 100),
    first_token_s=st.none() | moments,
    last_token_s=st.none() | moments,
    longest_gap_s=st.none() | st.floats(0, 100),
)
anything = st.builds(
    RequestMetrics,
    request_id=st.text(),
    operation=st.sampled_from(["chat", "text_completion", "tokenize", "detokenize"]),
    model=st.text(),
    stream=st.booleans(),
    arrived_s=moments,
    ended_s=moments,
    status=st.integers(100, 599),
    outcome=st.sampled_from(names.OUTCOMES) | st.text(max_size=5),
    error=st.none() | st.sampled_from(["overloaded", "deadline_exceeded", "engine_died"]) | st.text(max_size=5),
    first_write_s=st.none() | moments,
    stages=st.lists(stages, max_size=6).map(tuple),
    choices=st.lists(choices, max_size=3).map(tuple),
    prompt_tokens=st.none() | st.integers(0, 5000),
)


@given(st.lists(anything, max_size=8))
def test_any_requests_are_explained_and_shares_add_up(requests: list[RequestMetrics]) -> None:
    found = explain(requests, one_by_one=True)
    for bucket in found.buckets:
        given_shares = [part.share for part in bucket.stages]
        if any(part.seconds.p99 > 0 for part in bucket.stages):
            assert sum(given_shares) == pytest.approx(1.0)
            assert all(share >= 0 for share in given_shares)
            assert bucket.dominant is not None
        else:
            assert set(given_shares) <= {None}
            assert bucket.dominant is None
    for one in found.waterfalls:
        if one.e2e_s > 0:
            assert sum(row.share for row in one.rows) == pytest.approx(1.0)
    assert {symptom.layer for symptom in found.symptoms} - {None} <= {layer.name for layer in found.layers}
    assert msgspec.json.decode(msgspec.json.encode(found))
