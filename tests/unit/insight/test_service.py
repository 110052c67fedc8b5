import msgspec
import pytest

from serve_app.config import InsightSection
from serve_app.insight import service as module
from serve_app.insight.figures import View
from serve_app.insight.page import page
from serve_app.insight.service import InsightClient, InsightService
from serve_app.messages import HopReport, RequestMetrics

T = 1_700_000_000.0


class Clock:
    now_s = T

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(clock: Clock) -> InsightService:
    return InsightService(InsightSection(), clock)


def report(request_id: str) -> HopReport:
    request = RequestMetrics(request_id, "chat", "m", False, T - 1, T, 200, "ok", trace_id=f"trace-{request_id}")
    return HopReport("gateway", "g0", T, 0, 0, requests=(request,))


async def total(client: InsightClient) -> int:
    return msgspec.json.decode(await client.view(), type=View).totals.requests


async def test_a_view_is_made_once_a_second(service: InsightService, clock: Clock) -> None:
    await service.report(report("a"))
    assert await total(service) == 1
    await service.report(report("b"))
    clock.now_s += 0.9
    assert await total(service) == 1
    clock.now_s += 0.1
    assert await total(service) == 2


async def test_many_open_pages_cost_one_computation(service: InsightService, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(*arguments: object) -> object:
        made.append(arguments)
        return {"view": len(made)}

    monkeypatch.setattr(module, "view", counted)
    assert {await service.view() for _ in range(50)} == {b'{"view":1}'}


async def test_a_clock_that_was_set_back_does_not_keep_an_old_view(service: InsightService, clock: Clock) -> None:
    assert await total(service) == 0
    await service.report(report("a"))
    clock.now_s -= 3600
    assert await total(service) == 1


async def test_it_gives_the_requests_of_its_history(service: InsightService) -> None:
    for request_id in ("a", "b", "a"):
        await service.report(report(request_id))
    assert [one.request_id for one in await service.requests(2, None)] == ["b", "a"]
    assert len(await service.requests(None, "a")) == 2
    assert len(await service.requests(200, "trace-b")) == 1
    assert await service.requests(None, "c") == ()


def test_the_page_is_one_file_that_loads_nothing() -> None:
    html = page().decode()
    assert html.startswith("<!doctype html>")
    assert "https://" not in html
    assert "innerHTML" not in html
    assert page() is page()
