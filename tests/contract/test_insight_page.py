"""The live page in a real Chromium, over synthetic requests: what it shows is the view, on a desk and on a phone."""

import os
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn
from browser import chromium, find_chromium
from insight_samples import HOSTILE_ID, failed_request, fill, sample_request
from playwright.sync_api import Browser, Page, expect
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from serve_app.config import InsightSection
from serve_app.insight.figures import View
from serve_app.insight.history import History
from serve_app.insight.page import page as page_html
from serve_app.insight.view import view
from serve_app.messages import HopReport, RequestMetrics
from serve_app.telemetry.names import LENGTHS, STAGES

CSP = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
KEY = "k-123"
HOSTILE_ERROR = "<b>boom</b>"
SCREENS = {"desktop": {"width": 1440, "height": 900}, "phone": {"width": 390, "height": 844}}


@dataclass
class Site:
    """The page, its data as of one moment, and the status that the data is answered with."""

    history: History
    now_s: float
    status: int = 200
    key: str | None = None
    url: str = ""
    requests: list[RequestMetrics] = field(default_factory=list)

    def view(self) -> View:
        return view(self.history, self.now_s)

    async def page(self, _: Request) -> Response:
        return Response(page_html(), media_type="text/html; charset=utf-8", headers={"content-security-policy": CSP})

    async def data(self, request: Request) -> Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return Response(b"{}", 401)
        return Response(msgspec.json.encode(self.view()), self.status, media_type="application/json")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def site() -> Iterator[Site]:
    """With a request whose id is hostile, the slowest of all."""
    site = _served(now_s=time.time())
    fill(site.history, site.now_s, seconds=120)
    rng = random.Random(3)
    hostile = sample_request(rng, site.now_s - 8.0, 900, 500, request_id=HOSTILE_ID)
    failed = failed_request(rng, site.now_s - 1, "engine_died")
    failed = msgspec.structs.replace(failed, error=HOSTILE_ERROR)
    site.history.add(HopReport("gateway", "gateway-0", site.now_s, 1, 0, requests=(hostile, failed)), site.now_s)
    site.requests = [hostile, failed]
    with _running(site):
        yield site


@pytest.fixture
def empty_site() -> Iterator[Site]:
    """Replicas that have reported, and no request yet."""
    site = _served(now_s=time.time())
    site.history.add(HopReport("gateway", "gateway-0", site.now_s, 0, 0), site.now_s)
    with _running(site):
        yield site


def _served(now_s: float) -> Site:
    return Site(History(InsightSection()), now_s)


class _running:
    """uvicorn on a free port of loopback, in a thread of its own, for the time of a `with` block."""

    def __init__(self, site: Site) -> None:
        routes = [Route("/insight", site.page), Route("/insight/", site.page), Route("/insight/data", site.data)]
        app = Starlette(routes=[*routes, Mount("/behind/a/prefix", routes=routes)])
        self._site = site
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> None:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            self._thread.join(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self._site.url = f"http://127.0.0.1:{port}"

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()


@dataclass
class Watched:
    """A page, and everything that went wrong on it or left its origin."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    def value(self, metric: str, **where: str) -> float | None:
        """The number behind a figure; None where the page says that it is unknown."""
        found = self.page.locator(_selector(metric, where))
        assert found.count() == 1, f"{metric} {where}: {found.count()} on the page"
        text = found.get_attribute("data-value")
        return None if text is None else float(text)


def _selector(metric: str, where: dict[str, str]) -> str:
    return f'[data-metric="{metric}"]' + "".join(f'[data-{name}="{value}"]' for name, value in where.items())


def _open(browser: Browser, url: str, screen: str = "desktop", scheme: Any = "light", clock: bool = False) -> Watched:
    context = browser.new_context(viewport=SCREENS[screen], color_scheme=scheme)  # type: ignore[arg-type]
    watched = Watched(context.new_page())
    watched.page.on("console", lambda message: watched.complaints.append(message.text))
    watched.page.on("pageerror", lambda error: watched.complaints.append(str(error)))
    watched.page.on("dialog", lambda dialog: (watched.complaints.append("a dialog"), dialog.dismiss()))
    watched.page.on("request", lambda request: watched.addresses.append(request.url))
    if clock:
        watched.page.clock.install()
    watched.page.goto(url)
    return watched


def _shot(page: Page, name: str, folder: Path, full_page: bool = True) -> None:
    folder = Path(os.environ.get("TOKENLINE_SCREENSHOTS", folder))
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"insight-{name}.png", full_page=full_page)


def _overflow(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
def test_the_page_shows_the_view(browser: Browser, site: Site, screen: str, scheme: str, tmp_path: Path) -> None:
    watched = _open(browser, f"{site.url}/insight", screen, scheme)
    expect(watched.page.locator("#main")).to_be_visible()
    shown = site.view()
    _check_totals(watched, shown)
    _check_buckets(watched, shown)
    _check_replicas(watched, shown)
    assert _overflow(watched.page) == 0
    _shot(watched.page, f"{screen}-{scheme}", tmp_path)

    watched.page.locator(".row").first.click()
    assert _overflow(watched.page) == 0
    _shot(watched.page, f"{screen}-{scheme}-request", tmp_path, full_page=False)
    assert watched.complaints == []
    assert all(address.startswith((site.url, "data:")) for address in watched.addresses)
    watched.page.context.close()


def _check_totals(watched: Watched, shown: View) -> None:
    totals = shown.totals
    assert totals.requests > 100
    assert watched.value("total-requests") == totals.requests
    assert watched.value("total-prompt-tokens") == totals.prompt_tokens
    assert watched.value("total-completion-tokens") == totals.completion_tokens
    assert watched.value("total-errors") == sum(totals.errors.values())
    assert watched.value("total-dropped") == totals.dropped
    for kind, count in totals.errors.items():
        assert watched.value("errors", kind=kind) == count
        assert watched.value("errors-in-window", kind=kind) == shown.errors[kind]
    assert watched.value("requests-per-s") == shown.recent.requests_per_s
    assert watched.value("completion-tokens-per-s") == shown.recent.completion_tokens_per_s
    assert watched.value("covered-s") == shown.covered_s


def _check_buckets(watched: Watched, shown: View) -> None:
    for name in ("ttft", "tpot", "e2e"):
        found = getattr(shown.everything, f"{name}_s")
        assert [watched.value(f"{name}-{rank}") for rank in ("p50", "p95", "p99")] == [found.p50, found.p95, found.p99]
    assert {bucket.length for bucket in shown.buckets if bucket.requests} == set(LENGTHS)
    for bucket in (shown.everything, *shown.buckets):
        where = {"bucket": bucket.length}
        assert watched.value("bucket-requests", **where) == bucket.requests
        assert watched.value("bucket-ttft-p50", **where) == (bucket.ttft_s and bucket.ttft_s.p50)
        assert watched.value("bucket-e2e-p95", **where) == (bucket.e2e_s and bucket.e2e_s.p95)
        for stage, share in bucket.shares.items():
            if share:
                assert watched.value("share", stage=stage, **where) == share


def _check_replicas(watched: Watched, shown: View) -> None:
    assert len(shown.engines) == 2
    for engine in shown.engines:
        assert engine.load is not None
        assert watched.value("kv-usage", replica=engine.replica) == engine.load.kv_usage
        assert watched.value("running", replica=engine.replica) == engine.load.running
        assert watched.value("waiting", replica=engine.replica) == engine.load.waiting
        assert watched.value("prefix-hit-share", replica=engine.replica) == engine.prefix_hit_share
    for hop in shown.hops:
        assert watched.value("replicas", hop=hop.hop) == hop.replicas
        assert watched.value("in-flight", hop=hop.hop) == hop.in_flight
        assert watched.value("queued", hop=hop.hop) == hop.queued


def test_a_row_opens_every_span_of_its_request_and_escape_closes_it(browser: Browser, site: Site) -> None:
    watched = _open(browser, f"{site.url}/insight")
    request = next(one for one in site.view().slowest if one.outcome == "ok" and one.request_id != HOSTILE_ID)
    row = watched.page.locator(f'.row[data-request="{request.request_id}"]')
    row.focus()
    watched.page.keyboard.press("Enter")
    dialog = watched.page.locator("dialog")
    expect(dialog).to_be_visible()
    expect(dialog.locator("h2")).to_have_text(request.request_id)
    expect(dialog.locator("#trace-id")).to_have_text(request.trace_id or "")
    assert watched.value("request-e2e") == request.e2e_s
    assert watched.value("request-ttft") == request.ttft_s
    assert watched.value("request-tpot") == request.tpot_s
    spans = [
        (span.get_attribute("data-span"), [_raw(span, key) for key in ("begin", "duration", "count", "longest")])
        for span in dialog.locator("[data-span]").all()
    ]
    measured = next(one for one in site.history.requests() if one.request_id == request.request_id)
    assert sorted(name for name, _ in spans if name) == sorted(stage.name for stage in measured.stages)
    assert {name for name, _ in spans} <= set(STAGES)
    for (name, numbers), span in zip(spans, request.spans, strict=True):
        of_pieces = [span.count, span.longest_s] if span.pieces else [None, None]
        assert (name, numbers) == (span.name, [span.begin_s, span.duration_s, *of_pieces])
    watched.page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(row).to_be_focused()
    watched.page.context.close()


def _raw(span: Any, key: str) -> float | None:
    cell = span.locator(f"[data-{key}]")
    return float(cell.get_attribute("data-value")) if cell.count() else None


def test_what_comes_from_outside_is_shown_as_text(browser: Browser, site: Site) -> None:
    watched = _open(browser, f"{site.url}/insight")
    row = watched.page.locator(".row", has_text=HOSTILE_ID)
    expect(row).to_have_count(1)
    row.click()
    expect(watched.page.locator("dialog h2")).to_have_text(HOSTILE_ID)
    expect(watched.page.locator("#errors")).to_contain_text(HOSTILE_ERROR)
    assert watched.page.locator("img, #errors b").count() == 0
    assert watched.complaints == []
    watched.page.context.close()


def test_the_rows_keep_the_focus_while_the_page_renews_itself(browser: Browser, site: Site) -> None:
    watched = _open(browser, f"{site.url}/insight", clock=True)
    row = watched.page.locator(".row").nth(5)
    row.focus()
    with watched.page.expect_response("**/insight/data"):
        watched.page.clock.fast_forward(3000)
    watched.page.evaluate("new Promise(requestAnimationFrame)")
    expect(row).to_be_focused()
    watched.page.context.close()


@pytest.mark.parametrize("screen", SCREENS)
def test_before_the_first_request_it_says_so_and_no_zero(
    browser: Browser, empty_site: Site, screen: str, tmp_path: Path
) -> None:
    watched = _open(browser, f"{empty_site.url}/insight", screen)
    expect(watched.page.locator("#empty")).to_be_visible()
    expect(watched.page.locator("#tiles")).to_be_hidden()
    assert watched.value("ttft-p50") is None
    assert watched.value("e2e-p99") is None
    assert watched.value("in-flight", hop="gateway") == 0
    expect(watched.page.locator("#gpus-card")).to_be_hidden()
    assert _overflow(watched.page) == 0
    assert watched.complaints == []
    _shot(watched.page, f"empty-{screen}", tmp_path)
    watched.page.context.close()


def test_gpus_are_shown_where_there_are_any(browser: Browser, empty_site: Site, tmp_path: Path) -> None:
    fill(empty_site.history, empty_site.now_s, seconds=2, gpus=True)
    watched = _open(browser, f"{empty_site.url}/insight", "phone", "dark")
    expect(watched.page.locator("#gpus-card")).to_contain_text("NVIDIA H200")
    assert _overflow(watched.page) == 0
    _shot(watched.page, "gpus-phone", tmp_path)
    watched.page.context.close()


def test_without_an_answer_it_says_how_old_its_data_is_and_recovers(
    browser: Browser, site: Site, tmp_path: Path
) -> None:
    watched = _open(browser, f"{site.url}/insight", clock=True)
    expect(watched.page.locator("#live")).to_have_attribute("data-state", "live")
    site.status = 503
    with watched.page.expect_response("**/insight/data"):
        watched.page.clock.fast_forward(20_000)
    watched.page.clock.run_for(1000)
    expect(watched.page.locator("#banner")).to_have_text(re.compile(r"status 503.*2\d s old"))
    expect(watched.page.locator("#live")).to_have_attribute("data-state", "stale")
    _shot(watched.page, "stale", tmp_path, full_page=False)
    site.status = 200
    with watched.page.expect_response("**/insight/data"):
        watched.page.clock.run_for(4000)
    expect(watched.page.locator("#banner")).to_be_hidden()
    watched.page.context.close()


def test_a_service_that_never_answered_is_named_at_once(browser: Browser, empty_site: Site) -> None:
    empty_site.status = 503
    watched = _open(browser, f"{empty_site.url}/insight")
    expect(watched.page.locator("#banner")).to_contain_text("answers with status 503")
    expect(watched.page.locator("#main")).to_be_hidden()
    watched.page.context.close()


def test_locked_data_opens_with_the_admin_key(browser: Browser, site: Site, tmp_path: Path) -> None:
    site.key = KEY
    watched = _open(browser, f"{site.url}/insight", "phone")
    expect(watched.page.locator("#banner")).to_contain_text("needs the admin key")
    _shot(watched.page, "locked-phone", tmp_path)
    watched.page.get_by_label("Admin key").fill(KEY)
    watched.page.get_by_role("button", name="Unlock").click()
    expect(watched.page.locator("#main")).to_be_visible()
    expect(watched.page.locator("#banner")).to_be_hidden()
    assert all(KEY not in address for address in watched.addresses)
    watched.page.context.close()


@pytest.mark.parametrize("path", ["/behind/a/prefix/insight", "/insight/"])
def test_it_finds_its_data_next_to_itself(browser: Browser, site: Site, path: str) -> None:
    watched = _open(browser, site.url + path)
    expect(watched.page.locator("#main")).to_be_visible()
    assert watched.addresses[:2] == [site.url + path, site.url + path.rstrip("/") + "/data"]
    watched.page.context.close()


def test_without_chromium_the_failure_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TOKENLINE_CHROMIUM", raising=False)
    with pytest.raises(RuntimeError, match="make tools"):
        find_chromium()
    monkeypatch.setenv("TOKENLINE_CHROMIUM", "/nowhere/chromium")
    with pytest.raises(RuntimeError, match="TOKENLINE_CHROMIUM=/nowhere/chromium"):
        find_chromium()
