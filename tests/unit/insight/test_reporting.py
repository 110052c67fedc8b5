"""The report once a second: nothing lost, nothing metered twice, silent without news, and never in anybody's way."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest

from serve_app.insight import reporting
from serve_app.insight.reporting import Reporting
from serve_app.messages import HopReport, LoadReport, RequestMetrics
from serve_app.telemetry.metrics import Observation
from serve_app.telemetry.outbox import Outbox

Run = Callable[[Coroutine[Any, Any, Any]], Any]

MODEL = "m"


def request(number: int) -> RequestMetrics:
    return RequestMetrics(str(number), "chat", MODEL, False, 0.0, 1.0, 200, "ok")


class Replica:
    """A replica, its meter and the insight that it reports to; each fails as long as the test says so."""

    def __init__(self, max_requests: int = 100) -> None:
        self.outbox = Outbox(max_requests)
        self.now = HopReport("gateway", "gateway-0", 100.0, 0, 0)
        self.observations: list[Observation] = []
        self.reports: list[HopReport] = []
        self.sampling: Exception | None = None
        self.metering: Exception | None = None
        self.insight: BaseException | None = None
        self.hanging: asyncio.Event | None = None
        self.asked = 0
        self.reporting = Reporting(self.sample, self.outbox, MODEL, self, self)

    async def sample(self) -> HopReport:
        if self.sampling is not None:
            raise self.sampling
        return self.now

    def record(self, observations: Sequence[Observation]) -> None:
        if self.metering is not None:
            raise self.metering
        self.observations.extend(observations)

    async def report(self, report: HopReport) -> None:
        self.asked += 1
        if self.hanging is not None:
            self.hanging.set()
            await asyncio.Event().wait()
        if self.insight is not None:
            raise self.insight
        self.reports.append(report)

    async def view(self) -> bytes:
        raise NotImplementedError

    async def requests(self, last: int | None, request_id: str | None) -> tuple[RequestMetrics, ...]:
        raise NotImplementedError

    def change(self, **fields: Any) -> None:
        self.now = msgspec.structs.replace(self.now, **fields)

    def add(self, *numbers: int) -> None:
        for number in numbers:
            self.outbox.add(request(number))

    def once(self) -> None:
        asyncio.run(self.reporting.once())

    @property
    def delivered(self) -> list[int]:
        return [int(one.request_id) for report in self.reports for one in report.requests]

    def total(self, metric: str) -> float:
        return sum(one.value for one in self.observations if one.metric == metric)


@pytest.fixture
def replica() -> Replica:
    return Replica()


def test_ended_requests_are_metered_and_reported_once(replica: Replica) -> None:
    replica.add(1, 2)
    replica.once()
    replica.add(3)
    replica.once()
    replica.once()
    assert replica.delivered == [1, 2, 3]
    assert replica.total("tokenline_requests") == 3
    assert replica.total("gen_ai_server_request_duration_seconds") == 3.0


def test_what_the_insight_could_not_take_comes_with_the_next_report_and_is_metered_once(replica: Replica) -> None:
    replica.insight = ConnectionError("gone")
    replica.add(1)
    replica.once()
    replica.add(2)
    replica.once()
    replica.insight = None
    replica.add(3)
    replica.once()
    replica.once()
    assert replica.delivered == [1, 2, 3]
    assert replica.total("tokenline_requests") == 3
    assert len(replica.reports) == 1


def test_requests_wait_for_a_sample_that_fails(replica: Replica) -> None:
    replica.sampling = RuntimeError("NVML")
    replica.add(1)
    replica.once()
    assert replica.asked == 0
    replica.sampling = None
    replica.once()
    assert replica.delivered == [1]
    assert replica.total("tokenline_requests") == 1


def test_a_meter_that_fails_takes_no_request_from_the_history(replica: Replica) -> None:
    replica.metering = RuntimeError("Ray")
    replica.add(1)
    replica.once()
    replica.metering = None
    replica.add(2)
    replica.once()
    assert replica.delivered == [1, 2]
    assert replica.total("tokenline_requests") <= 2


def test_an_outage_of_any_length_is_bounded_and_what_was_dropped_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "Outbox", lambda: Outbox(4))
    replica = Replica()
    replica.insight = ConnectionError("gone")
    for second in range(20):
        replica.add(2 * second, 2 * second + 1)
        replica.once()
    replica.insight = None
    replica.once()
    assert replica.delivered == [36, 37, 38, 39]
    assert replica.reports[0].dropped_requests == 36
    assert replica.total("tokenline_requests") == 40
    replica.once()
    assert replica.total("tokenline_dropped_requests") == 36


def test_requests_that_never_left_their_outbox_are_counted_too() -> None:
    replica = Replica(max_requests=2)
    replica.add(1, 2, 3)
    replica.once()
    assert replica.delivered == [2, 3]
    assert replica.reports[0].dropped_requests == replica.total("tokenline_dropped_requests") == 1


def test_counters_grow_by_what_came_since_the_last_report_that_was_metered(replica: Replica) -> None:
    replica.change(dropped_spans=5, exported_spans=10)
    replica.once()
    replica.insight = ConnectionError("gone")
    replica.change(dropped_spans=7, exported_spans=10)
    replica.once()
    replica.once()
    replica.insight = None
    replica.once()
    assert replica.total("tokenline_dropped_spans") == 7
    assert replica.total("tokenline_exported_spans") == 10


def test_a_report_that_could_not_be_metered_is_not_taken_for_metered(replica: Replica) -> None:
    replica.metering = RuntimeError("Ray")
    replica.change(dropped_spans=5)
    replica.once()
    replica.metering = None
    replica.once()
    assert replica.total("tokenline_dropped_spans") == 5


def test_without_news_there_is_only_a_heartbeat(replica: Replica) -> None:
    for second in range(31):
        replica.change(reported_s=100.0 + second)
        replica.once()
    assert [one.reported_s for one in replica.reports] == [100.0, 110.0, 120.0, 130.0]


def test_a_clock_that_was_set_back_does_not_silence_the_heartbeat(replica: Replica) -> None:
    for reported_s in (1000.0, 100.0, 101.0, 110.0):
        replica.change(reported_s=reported_s)
        replica.once()
    assert [one.reported_s for one in replica.reports] == [1000.0, 100.0, 110.0]


@pytest.mark.parametrize(
    "news",
    [{"in_flight": 1}, {"queued": 1}, {"exported_spans": 1}, {"dropped_spans": 1}, {"load": LoadReport(1, 0, 0.5, 8)}],
)
def test_news_is_reported_at_once(replica: Replica, news: dict[str, Any]) -> None:
    replica.once()
    replica.change(reported_s=101.0, **news)
    replica.once()
    replica.change(reported_s=102.0)
    replica.once()
    assert [one.reported_s for one in replica.reports] == [100.0, 101.0]


def test_news_that_did_not_arrive_is_still_news(replica: Replica) -> None:
    replica.once()
    replica.insight = ConnectionError("gone")
    replica.change(reported_s=101.0, in_flight=1)
    replica.once()
    replica.insight = None
    replica.change(reported_s=102.0)
    replica.once()
    assert [(one.reported_s, one.in_flight) for one in replica.reports] == [(100.0, 0), (102.0, 1)]


def test_an_insight_that_hangs_is_given_up_and_nothing_is_lost(replica: Replica, run_virtual: Run) -> None:
    async def work() -> float:
        replica.hanging = asyncio.Event()
        replica.add(1)
        await replica.reporting.once()
        return asyncio.get_running_loop().time()

    assert run_virtual(work()) == 5.0
    replica.hanging = None
    replica.once()
    assert replica.delivered == [1]


def test_the_end_of_the_replica_passes_and_loses_nothing(replica: Replica) -> None:
    async def work() -> None:
        replica.hanging = asyncio.Event()
        replica.add(1)
        task = asyncio.create_task(replica.reporting.once())
        await replica.hanging.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    replica.hanging = None
    replica.once()
    assert replica.delivered == [1]
    assert replica.total("tokenline_requests") == 1


def test_it_reports_once_a_second_until_it_is_cancelled_whatever_fails(replica: Replica, run_virtual: Run) -> None:
    async def work() -> None:
        replica.sampling = RuntimeError("NVML")
        replica.add(1)
        task = asyncio.create_task(replica.reporting.run())
        await asyncio.sleep(3.5)
        replica.sampling, replica.insight = None, ConnectionError("gone")
        await asyncio.sleep(3)
        assert replica.asked == 3
        replica.insight = None
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(work())
    assert replica.delivered == [1]


def test_failures_in_a_row_are_one_line_in_the_log(replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    for failing in (True, True, True, False, True, True):
        replica.insight = ConnectionError("gone") if failing else None
        replica.add(1)
        replica.once()
    assert [one.levelno for one in caplog.records] == [logging.WARNING] * 2
