import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.config import InsightSection
from serve_app.insight.history import BIN_S, SILENT_S, Counts, History
from serve_app.messages import HopReport, LoadReport, RequestMetrics, Stage

T = 1_700_000_000.0  # the begin of a bin


def request_at(ended_s: float, request_id: str = "r", **fields: object) -> RequestMetrics:
    whole = {
        "request_id": request_id,
        "operation": "chat",
        "model": "m",
        "stream": True,
        "arrived_s": ended_s - 0.5,
        "ended_s": ended_s,
        "status": 200,
        "outcome": "ok",
    }
    return RequestMetrics(**(whole | fields))  # type: ignore[arg-type]


def gateway(*requests: RequestMetrics, replica: str = "g0", dropped: int = 0) -> HopReport:
    return HopReport("gateway", replica, T, 0, 0, dropped_requests=dropped, requests=requests)


def engine(running: int, waiting: int = 0, kv_usage: float = 0.0) -> HopReport:
    return HopReport("engine", "e0", T, running, waiting, load=LoadReport(running, waiting, kv_usage, 100))


def ids(requests: tuple[RequestMetrics, ...]) -> list[str]:
    return [request.request_id for request in requests]


def history_of(**config: object) -> History:
    return History(InsightSection(**config))  # type: ignore[arg-type]


def test_requests_come_newest_last_in_whatever_order_they_were_reported() -> None:
    history = history_of()
    history.add(gateway(request_at(T + 2, "c"), request_at(T + 1, "b")), T + 3)
    history.add(gateway(request_at(T, "a"), replica="g1"), T + 3)
    assert ids(history.requests()) == ["a", "b", "c"]
    assert ids(history.requests(last=2)) == ["b", "c"]
    assert ids(history.requests(last=9)) == ["a", "b", "c"]
    assert ids(history.requests(last=0)) == []
    assert [one.request.request_id for one in history.entries(T + 3)] == ["a", "b", "c"]


def test_an_id_finds_every_request_of_it_and_every_request_of_a_trace() -> None:
    history = history_of()
    mine = request_at(T, "same", trace_id="t1")
    history.add(gateway(mine, request_at(T + 1, "other", trace_id="t1"), request_at(T + 2, "same")), T + 3)
    assert [one.ended_s for one in history.requests(request_id="same")] == [T, T + 2]
    assert ids(history.requests(request_id="t1")) == ["same", "other"]
    assert ids(history.requests(last=1, request_id="t1")) == ["other"]
    assert history.requests(request_id="nobody") == ()


def test_totals_and_counts_survive_what_makes_room() -> None:
    history = history_of(max_requests=3)
    for at in range(10):
        failed = {"error": "overloaded", "outcome": "refused"} if at % 2 else {}
        history.add(gateway(request_at(T + at, f"r{at}", prompt_tokens=10, completion_tokens=5, **failed)), T + at)
    assert ids(history.requests()) == ["r7", "r8", "r9"]
    totals = history.totals
    assert (totals.requests, totals.prompt_tokens, totals.completion_tokens) == (10, 100, 50)
    assert totals.errors == {"overloaded": 5}
    assert history.counts(T + 9) == {T: Counts(requests=10, completion_tokens=50, errors=5)}
    assert history.complete_from_s(T + 9) == T + 6


def test_unknown_tokens_count_as_none() -> None:
    history = history_of()
    history.add(gateway(request_at(T)), T)
    assert (history.totals.prompt_tokens, history.totals.completion_tokens) == (0, 0)


def test_a_request_is_forgotten_after_the_window_and_not_before() -> None:
    history = history_of(window_s=60)
    history.add(gateway(request_at(T, "a"), request_at(T + 30, "b")), T + 31)
    assert [one.request.request_id for one in history.entries(T + 60)] == ["a", "b"]
    assert [one.request.request_id for one in history.entries(T + 61)] == ["b"]
    history.add(gateway(), T + 61)
    assert ids(history.requests()) == ["b"]
    assert history.totals.requests == 2


def test_a_gateway_whose_clock_is_ahead_does_not_keep_requests_for_ever() -> None:
    history = history_of(window_s=60)
    history.add(gateway(request_at(T + 5000)), T)
    assert history.entries(T)[0].at_s == T
    history.add(gateway(), T + 61)
    assert history.requests() == ()


def test_a_silent_replica_is_forgotten_and_its_load_stays_for_the_window() -> None:
    history = history_of(window_s=100)
    history.add(engine(running=4), T)
    history.add(gateway(), T)
    assert [report.replica for report in history.replicas(T + SILENT_S)] == ["e0", "g0"]
    history.add(gateway(), T + SILENT_S + 1)
    assert [report.replica for report in history.replicas(T + SILENT_S + 1)] == ["g0"]
    assert history.loads(T + SILENT_S + 1)[("engine", "e0")][T].running == 4
    history.add(gateway(), T + 200)
    assert history.loads(T + 200) == {}


def test_the_latest_report_is_kept_without_its_requests() -> None:
    history = history_of()
    history.add(gateway(request_at(T)), T)
    history.add(msgspec.structs.replace(gateway(), in_flight=7), T + 1)
    (report,) = history.replicas(T + 1)
    assert (report.in_flight, report.requests) == (7, ())


def test_load_is_the_peak_of_each_bin() -> None:
    history = history_of()
    for at, (running, waiting, kv_usage) in enumerate([(1, 0, 0.1), (9, 3, 0.2), (2, 1, 0.9)]):
        history.add(engine(running, waiting, kv_usage), T + at)
    peak = history.loads(T + 3)[("engine", "e0")][T]
    assert (peak.running, peak.waiting, peak.kv_usage) == (9, 3, 0.9)


def test_a_replica_without_news_still_has_the_load_it_said_last() -> None:
    history = history_of()
    history.add(engine(running=5), T + 1)
    history.add(gateway(), T + 1)
    history.add(engine(running=1), T + 25)
    assert [peak.running for peak in history.loads(T + 35)[("engine", "e0")].values()] == [5, 5, 5, 1]
    assert history.counts(T + 25) == {T: Counts(), T + 10: Counts(), T + 20: Counts()}


def test_while_no_gateway_reports_its_bins_are_unknown() -> None:
    history = history_of()
    history.add(gateway(), T)
    history.add(engine(running=1), T + 300)
    history.add(gateway(), T + 300)
    assert T + 150 not in history.counts(T + 300)
    assert T + 150 not in history.loads(T + 300)[("engine", "e0")]


def test_dropped_requests_are_each_replicas_latest_count_summed() -> None:
    history = history_of()
    history.add(gateway(dropped=2), T)
    history.add(gateway(dropped=5), T + 1)
    history.add(gateway(replica="g1", dropped=1), T + 1)
    history.add(gateway(replica="g2"), T + 500)
    assert history.dropped == 6


def test_a_stage_that_this_version_does_not_know_is_left_out() -> None:
    history = history_of()
    history.add(gateway(request_at(T, stages=(Stage("reranker", T - 0.2, T - 0.1, 0.1),))), T)
    (entry,) = history.entries(T)
    assert entry.account.parts == {"unaccounted": pytest.approx(0.5)}


def test_before_any_report_nothing_is_covered() -> None:
    history = history_of()
    assert history.since_s is None
    assert history.complete_from_s(T) == T


@given(
    st.lists(st.tuples(st.floats(0, 400), st.floats(-50, 50)), max_size=60),
    st.integers(1, 20),
    st.floats(10, 200),
)
def test_it_stays_within_its_bounds(steps: list[tuple[float, float]], max_requests: int, window_s: float) -> None:
    history = history_of(max_requests=max_requests, window_s=window_s)
    now_s = T
    for step_s, late_s in steps:
        now_s += step_s
        history.add(gateway(request_at(now_s - late_s)), now_s)
        history.add(engine(1), now_s)
        entries = history.entries(now_s)
        assert len(entries) <= len(history.requests()) <= max_requests
        assert all(now_s - window_s <= one.at_s <= now_s for one in entries)
        assert history.complete_from_s(now_s) >= now_s - window_s
        most = window_s / BIN_S + 2
        assert len(history.counts(now_s)) <= most
        assert all(len(bins) <= most for bins in history.loads(now_s).values())
    assert history.totals.requests == len(steps)


def test_requests_of_very_many_choices_are_bounded_by_their_stages() -> None:
    history = history_of(max_requests=10)
    large = tuple(Stage("decode", T, T + 1, 1.0) for _ in range(100))
    for number in range(3):
        history.add(gateway(request_at(T + number, str(number), stages=large)), T + number)
    assert ids(history.requests()) == ["2"]  # 160 stages is room for one of them
    assert history.complete_from_s(T + 3) == T + 1
    history.add(gateway(request_at(T + 3, "small")), T + 3)
    assert ids(history.requests()) == ["2", "small"]
    assert history.totals.requests == 4
