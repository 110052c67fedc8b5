import random
import time
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from insight_samples import ENGINES, fill, sample_request

from serve_app.config import InsightSection
from serve_app.insight.figures import View
from serve_app.insight.history import History
from serve_app.insight.view import view
from serve_app.messages import ChoiceMetrics, GpuReport, HopReport, LoadReport, RequestMetrics, Stage
from serve_app.telemetry.names import DECODE, ENGINE_QUEUE, LENGTHS, PREFILL, STAGES, UNACCOUNTED

Make = Callable[..., RequestMetrics]
Refused = Callable[..., RequestMetrics]
T = 1_700_000_000.0


def gateway(*requests: RequestMetrics, **fields: int) -> HopReport:
    return HopReport("gateway", "g0", T, fields.pop("in_flight", 0), fields.pop("queued", 0), requests=requests)


def seen(*requests: RequestMetrics, now_s: float = T + 5) -> View:
    history = History(InsightSection())
    history.add(gateway(*requests), now_s)
    return view(history, now_s)


def test_nothing_is_unknown_and_not_zero() -> None:
    shown = view(History(InsightSection()), T)
    assert shown.everything.ttft_s is shown.everything.tpot_s is shown.everything.e2e_s is None
    assert shown.recent.requests_per_s is None
    assert shown.totals.since_s is None
    assert (shown.covered_s, shown.series.begins_s, shown.engines, shown.gpus, shown.slowest) == (0, [], [], [], [])
    assert b'"ttft_s":null' in msgspec.json.encode(shown)


def test_shares_are_of_the_summed_wait_and_add_up(make: Make) -> None:
    requests = [make(prefill=2.0), make(decode=1.0), make(gap=0.5, prompt_tokens=5000)]
    shown = seen(*requests)
    for bucket in (shown.everything, *shown.buckets):
        assert sum(bucket.shares.values()) == pytest.approx(1.0 if bucket.requests else 0.0)
    waits = [request.ended_s - request.arrived_s for request in requests]
    assert sum(shown.everything.seconds.values()) == pytest.approx(sum(waits))
    assert shown.everything.shares[PREFILL] == pytest.approx(2.03 / sum(waits), rel=1e-3)
    by_length = {bucket.length: bucket for bucket in shown.buckets}
    assert by_length["long"].shares[UNACCOUNTED] == pytest.approx(0.5 / waits[2], rel=1e-2)
    assert [bucket.length for bucket in shown.buckets] == list(LENGTHS)
    assert [bucket.requests for bucket in shown.buckets] == [2, 0, 1, 0]
    assert by_length["medium"].shares == {}


def test_requests_that_were_turned_away_count_but_say_nothing_of_the_wait(make: Make, refused: Refused) -> None:
    shown = seen(make(), *(refused() for _ in range(50)))
    alone = seen(make())
    assert (shown.everything.requests, shown.everything.served) == (51, 1)
    assert shown.everything.e2e_s == alone.everything.e2e_s
    assert shown.everything.shares == alone.everything.shares
    assert shown.outcomes == {"refused": 50, "ok": 1}
    assert shown.errors == shown.totals.errors == {"overloaded": 50}


def test_an_unknown_value_stays_out_of_the_percentiles(make: Make) -> None:
    without_first_token = make(fields={"first_write_s": None, "choices": ()})
    one_token = make(fields={"choices": (ChoiceMetrics(1, T, T),)})
    shown = seen(make(), without_first_token, one_token)
    assert shown.everything.ttft_s is not None
    assert shown.everything.ttft_s.p50 == shown.everything.ttft_s.p99 == pytest.approx(0.022, abs=1e-3)
    assert shown.everything.tpot_s is not None
    assert shown.everything.tpot_s.p50 == pytest.approx(0.002, abs=1e-6)
    nothing = seen(without_first_token)
    assert nothing.everything.ttft_s is nothing.everything.tpot_s is None
    assert nothing.everything.e2e_s is not None


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=40))
def test_percentiles_lie_within_what_was_measured(waits: list[float]) -> None:
    requests = [RequestMetrics(str(at), "chat", "m", True, T - wait, T, 200, "ok") for at, wait in enumerate(waits)]
    found = seen(*requests).everything.e2e_s
    assert found is not None
    assert min(waits) - 1e-6 <= found.p50 <= found.p95 + 1e-9 <= found.p99 + 2e-9 <= max(waits) + 1e-6


def test_the_series_has_whole_bins_from_the_first_report_on() -> None:
    history = History(InsightSection())
    history.add(gateway(), T + 5)
    for at in (5.5, 7.0, 12.0, 13.0, 25.0):
        request = RequestMetrics("r", "chat", "m", True, T + at - 0.4, T + at, 200, "ok", completion_tokens=30)
        history.add(gateway(msgspec.structs.replace(request, first_write_s=T + at - 0.3)), T + at)
    series = view(history, T + 34).series
    assert series.begins_s == [T, T + 10, T + 20]
    assert series.requests_per_s == pytest.approx([2 / 5, 0.2, 0.1])
    assert series.completion_tokens_per_s == pytest.approx([60 / 5, 6.0, 3.0])
    assert series.errors_per_s == [0, 0, 0]
    assert series.ttft_p50_s == pytest.approx([0.1, 0.1, 0.1], abs=1e-6)


def test_a_bin_without_requests_is_zero_and_one_without_a_gateway_unknown() -> None:
    history = History(InsightSection())
    history.add(gateway(), T)
    history.add(gateway(), T + 100)
    series = view(history, T + 110).series
    assert series.requests_per_s == [0.0, *[None] * 9, 0.0]
    assert set(series.ttft_p95_s) == {None}


def test_the_window_bounds_the_series() -> None:
    history = History(InsightSection(window_s=60))
    for second in range(300):
        history.add(gateway(), T + second)
    shown = view(history, T + 299)
    assert shown.series.begins_s == [T + 230, T + 240, T + 250, T + 260, T + 270, T + 280]
    assert shown.covered_s == 60


def test_recent_rates_are_of_ten_seconds_that_every_gateway_has_reported() -> None:
    history = History(InsightSection())
    for second in range(31):
        ended = RequestMetrics(
            "r", "chat", "m", True, T + second - 1.5, T + second - 0.5, 200, "ok", completion_tokens=8
        )
        history.add(gateway(ended, ended), T + second)
    recent = view(history, T + 30.2).recent
    assert (recent.requests_per_s, recent.completion_tokens_per_s, recent.errors_per_s) == pytest.approx((2, 16, 0))
    assert view(history, T + 100).recent.requests_per_s is None


def test_each_engine_replica_is_shown_by_itself_and_a_gone_one_keeps_its_past() -> None:
    history = History(InsightSection())
    for second in range(60):
        load = LoadReport(8, 2, 0.5, 100, preemptions=3, prefix_queries_tokens=200, prefix_hits_tokens=50)
        history.add(HopReport("engine", "b", T, 8, 2, load=load), T + second)
        if second < 20:
            history.add(HopReport("engine", "a", T, 1, 0, load=LoadReport(1, 0, 0.9, 100)), T + second)
    gone, here = view(history, T + 60).engines
    assert (gone.replica, gone.load, gone.prefix_hit_share) == ("a", None, None)
    assert gone.kv_usage == [0.9, 0.9, None, None, None, None]
    assert here.load is not None
    assert (here.load.preemptions, here.prefix_hit_share) == (3, 0.25)
    assert (here.running, here.waiting) == ([8] * 6, [2] * 6)


def test_a_prefix_cache_that_was_never_asked_has_no_hit_share() -> None:
    history = History(InsightSection())
    history.add(HopReport("engine", "a", T, 1, 0, load=LoadReport(1, 0, 0.9, 100)), T)
    assert view(history, T).engines[0].prefix_hit_share is None


def test_hops_are_summed_over_their_replicas_in_the_paths_order() -> None:
    history = History(InsightSection())
    for hop, replica in (("reranker", "x"), ("engine", "e"), ("gateway", "g0"), ("gateway", "g1"), ("tokenizer", "t")):
        history.add(HopReport(hop, replica, T, 2, 1, dropped_spans=4), T)
    hops = view(history, T).hops
    assert [hop.hop for hop in hops] == ["gateway", "tokenizer", "engine", "reranker"]
    assert (hops[0].replicas, hops[0].in_flight, hops[0].queued, hops[0].dropped_spans) == (2, 4, 2, 8)


def test_gpus_are_those_that_were_reported() -> None:
    history = History(InsightSection())
    gpu = GpuReport(0, "H200", None, 0.5, 10, 20, 12, 11.0)
    history.add(HopReport("engine", "e", T, 0, 0, gpus=(gpu,)), T)
    (shown,) = view(history, T).gpus
    assert (shown.hop, shown.replica, shown.gpu) == ("engine", "e", gpu)


def test_the_slowest_twenty_come_with_their_spans(make: Make) -> None:
    requests = [make(prefill=seconds / 10, fields={"request_id": f"r{seconds}"}) for seconds in range(30)]
    slowest = seen(*requests).slowest
    assert [one.request_id for one in slowest] == [f"r{seconds}" for seconds in range(29, 9, -1)]
    first, measured = slowest[0], requests[29]
    assert Counter(span.name for span in first.spans) == Counter(stage.name for stage in measured.stages)
    assert sum(first.parts.values()) == pytest.approx(first.e2e_s)
    prefill = next(span for span in first.spans if span.name == PREFILL)
    assert prefill.duration_s == pytest.approx(2.9, abs=1e-6)
    assert prefill.begin_s == pytest.approx(0.0065, abs=1e-6)
    assert [span.begin_s for span in first.spans] == sorted(span.begin_s for span in first.spans)


def test_a_request_of_very_many_choices_keeps_its_longest_spans(make: Make) -> None:
    stages = tuple(Stage(DECODE, T, T + at, at, 1, at) for at in range(1, 201))
    (shown,) = seen(make(fields={"stages": stages, "arrived_s": T, "ended_s": T + 200})).slowest
    assert (len(shown.spans), shown.spans_left_out) == (64, 136)
    assert min(span.duration_s for span in shown.spans) == 137


def test_stages_have_their_hop_in_the_paths_order() -> None:
    stages = {stage.name: stage.hop for stage in seen().stages}
    assert list(stages) == [*STAGES, UNACCOUNTED]
    assert (stages[ENGINE_QUEUE], stages[DECODE], stages[UNACCOUNTED]) == ("engine", "engine", None)
    assert set(stages.values()) == {"gateway", "tokenizer", "engine", "postprocess", None}


def test_a_busy_history_is_shown_consistently_and_quickly() -> None:
    history, now_s = History(InsightSection()), T + 900
    fill(history, now_s, seconds=120)
    rng = random.Random(1)
    template = sample_request(rng, now_s - 3, 200, 60)
    many = tuple(msgspec.structs.replace(template, request_id=str(at)) for at in range(9000))
    history.add(gateway(*many), now_s)
    begun_s = time.process_time()
    shown = view(history, now_s)
    assert time.process_time() - begun_s < 1.0  # about 0.05 s; a wide bound, since these machines are shared
    assert shown.everything.requests == sum(bucket.requests for bucket in shown.buckets) == shown.totals.requests
    assert [engine.replica for engine in shown.engines] == list(ENGINES)
    assert len(msgspec.json.encode(shown)) < 150_000
