"""The insight's routes over ASGI: their headers, their queries, their key, and an insight that is down."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from serve_app.config import InsightSection, TracingSection, load
from serve_app.errors import HopUnavailable
from serve_app.gateway import insight as module
from serve_app.gateway.observe import Telemetry
from serve_app.gateway.readiness import Readiness
from serve_app.gateway.server import Gateway
from serve_app.insight.service import InsightClient, InsightService
from serve_app.messages import HopReport, RequestMetrics
from serve_app.path import Hops
from serve_app.telemetry.outbox import Outbox
from serve_app.telemetry.tracing import start

ROUTES = ("/insight", "/insight/data", "/insight/requests")
every_route = pytest.mark.parametrize("route", ROUTES)


class Insight:
    """Notes what it is asked for; raises or hangs if told so."""

    def __init__(self, error: Exception | None = None, hangs: bool = False) -> None:
        self.asked: list[Any] = []
        self.gave_up = 0
        self._error, self._hangs = error, hangs

    async def report(self, report: HopReport) -> None: ...

    async def view(self) -> bytes:
        await self._fail()
        return b'{"a":1}'

    async def requests(self, last: int | None, request_id: str | None) -> tuple[RequestMetrics, ...]:
        self.asked.append((last, request_id))
        await self._fail()
        return (RequestMetrics("the-id", "chat", "m", False, 1.0, 2.0, 200, "ok"),)

    async def _fail(self) -> None:
        if self._error is not None:
            raise self._error
        if self._hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.gave_up += 1


async def get(insight: InsightClient, url: str, key_file: Path | None = None, **options: Any) -> httpx.Response:
    gateway: dict[str, Any] = {} if key_file is None else {"admin_key_file": str(key_file)}
    config = load({"model": {"name": "m", "source": "s"}, "gateway": gateway})
    telemetry = Telemetry(start(TracingSection(), "gateway", "gateway-0", "m"), Outbox(), insight)
    hops = Hops(None, None, 100)  # type: ignore[arg-type]  # no hop is asked
    app = Gateway(config, hops, Readiness(config, hops), telemetry)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        answer = await client.get(url, **options)
    assert telemetry.outbox.take() == ()  # nobody's request for tokens
    return answer


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_text("correct horse\n")
    return file


@every_route
async def test_nothing_of_it_is_kept_framed_or_loaded_from_elsewhere(route: str) -> None:
    answer = await get(Insight(), route)
    assert answer.status_code == 200
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert not any("http" in sources or "*" in sources for sources in policy.values())
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "traceparent" not in answer.headers


async def test_each_route_says_what_it_gives() -> None:
    page, data, requests = [await get(Insight(), route) for route in ROUTES]
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text.lstrip().lower().startswith("<!doctype html>")
    assert data.headers["content-type"] == requests.headers["content-type"] == "application/json"
    assert data.content == b'{"a":1}'
    (request,) = msgspec.json.decode(requests.content, type=tuple[RequestMetrics, ...])
    assert (request.request_id, request.completion_tokens) == ("the-id", None)


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ("", (200, None)),
        ("last=1", (1, None)),
        ("last=10000", (10_000, None)),
        ("last=0000010", (10, None)),
        ("id=abc", (200, "abc")),
        ("id=abc&last=3", (3, "abc")),
        ("id=", (200, "")),
    ],
)
async def test_a_right_query_is_what_the_insight_is_asked(query: str, asked: tuple[int, str | None]) -> None:
    insight = Insight()
    assert (await get(insight, f"/insight/requests?{query}")).status_code == 200
    assert insight.asked == [asked]


@pytest.mark.parametrize(
    "last",
    [
        "0",
        "-1",
        "10001",
        "x",
        "",
        "1.5",
        "1e3",
        "+1",
        " 1",
        "0x10",
        "١",
        "²",
        "0000000010001",
        "000000001" + "0" * 5000,
        "9" * 5000,
    ],
)
async def test_a_wrong_last_is_refused_by_name(last: str) -> None:
    insight = Insight()
    answer = await get(insight, "/insight/requests", params={"last": last})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "last")
    assert insight.asked == []


@pytest.mark.parametrize(("name", "named"), [("newest", "newest"), ("Last", "Last"), ("x" * 500, "x" * 50)])
async def test_an_unknown_query_is_refused_by_name(name: str, named: str) -> None:
    answer = await get(Insight(), "/insight/requests", params={name: "1", "last": "3"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)


@every_route
@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic %%%", "Bearer", "correct horse"])
async def test_without_the_key_nothing_is_shown_and_the_browser_asks(
    key_file: Path, route: str, authorization: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    insight = Insight()
    headers = {} if authorization is None else {"authorization": authorization}
    with caplog.at_level(logging.DEBUG):
        answer = await get(insight, f"{route}?nonsense=1", key_file, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == 'Basic realm="tokenline", charset="UTF-8"'
    assert insight.asked == []
    assert "correct horse" not in answer.text + caplog.text


@every_route
async def test_with_the_key_all_is_shown(key_file: Path, route: str) -> None:
    bearer = await get(Insight(), route, key_file, headers={"authorization": "Bearer correct horse"})
    basic = await get(Insight(), route, key_file, auth=("anybody", "correct horse"))
    assert (bearer.status_code, basic.status_code) == (200, 200)


@pytest.mark.parametrize("route", ROUTES[1:])
async def test_an_insight_that_is_down_is_a_503_that_says_when_to_come_back(route: str) -> None:
    answer = await get(Insight(HopUnavailable("No insight replica can take the request now.", "insight", 1.0)), route)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("route", ROUTES[1:])
async def test_an_insight_that_hangs_is_given_up(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.0)
    insight = Insight(hangs=True)
    answer = await get(insight, route)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert insight.gave_up == 1


async def test_the_page_needs_no_insight() -> None:
    assert (await get(Insight(HopUnavailable("down")), "/insight")).status_code == 200


async def test_what_an_insight_fails_with_stays_here() -> None:
    answer = await get(Insight(RuntimeError("a path of ours")), "/insight/data")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "path of ours" not in answer.text


async def test_the_real_insight_gives_what_was_reported() -> None:
    insight = InsightService(InsightSection())
    now_s = time.time()
    ended = RequestMetrics("ended", "chat", "m", False, now_s - 1, now_s, 200, "ok", trace_id="a" * 32)
    await insight.report(HopReport("gateway", "g-0", now_s, 0, 0, requests=(ended,)))
    for query in ("", "?id=ended", f"?id={'a' * 32}", "?last=1"):
        answer = await get(insight, f"/insight/requests{query}")
        assert [one["request_id"] for one in answer.json()] == ["ended"], query
    assert (await get(insight, "/insight/requests?id=other")).json() == []
