"""One record, one span and one log line for each request of the API, however it ends, and none for other routes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serve_app.config import InsightSection, TracingSection
from serve_app.errors import EngineDied
from serve_app.gateway.observe import OPERATIONS, ObserveMiddleware, Telemetry, recording_of, span_of
from serve_app.insight.service import InsightService
from serve_app.messages import RequestMetrics
from serve_app.telemetry.names import WRITE
from serve_app.telemetry.outbox import Outbox
from serve_app.telemetry.tracing import start

CHAT = "/v1/chat/completions"
Inner = Callable[[Any, Any, Any], Awaitable[None]]


class Gateway:
    """The middleware around an inner application, and what it left behind."""

    def __init__(self, inner: Inner) -> None:
        self.outbox = Outbox()
        tracing = start(TracingSection(), "gateway", "gateway-0", "m")
        self.observe = ObserveMiddleware(inner, "m", Telemetry(tracing, self.outbox, InsightService(InsightSection())))
        self.sent: list[Any] = []

    async def ask(self, path: str = CHAT, method: str = "POST", headers: Any = (), root_path: str = "") -> None:
        async def send(message: Any) -> None:
            self.sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": root_path + path,
            "root_path": root_path,
            "headers": list(headers),
            "tokenline.request_id": "the-id",
        }
        await self.observe(scope, asyncio.Event().wait, send)

    def request(self) -> RequestMetrics:
        (request,) = self.outbox.take()
        return request

    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}


async def answers(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"hello", "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    if (recording := recording_of(scope)) is not None:
        recording.whole = True


@pytest.mark.parametrize("path", OPERATIONS)
async def test_a_request_of_the_api_is_recorded_once(path: str, caplog: pytest.LogCaptureFixture) -> None:
    gateway = Gateway(answers)
    with caplog.at_level(logging.INFO, "serve_app.gateway.observe"):
        await gateway.ask(path)
    request = gateway.request()
    assert (request.request_id, request.operation, request.model) == ("the-id", OPERATIONS[path], "m")
    assert (request.outcome, request.status, request.error) == ("ok", 200, None)
    assert request.arrived_s <= request.first_write_s <= request.ended_s
    (writing,) = [one for one in request.stages if one.name == WRITE]
    assert writing.count == 1  # an empty body is no bytes
    assert request.trace_id == gateway.headers()["traceparent"].split("-")[1]
    (line,) = caplog.records
    assert line.fields["outcome"] == "ok"
    assert gateway.observe.in_flight == 0


@pytest.mark.parametrize(("path", "method"), [("/health", "GET"), (CHAT, "GET"), ("/v1/models", "POST"), ("/", "POST")])
async def test_other_routes_pass_as_they_are(path: str, method: str) -> None:
    gateway = Gateway(answers)
    await gateway.ask(path, method)
    assert gateway.outbox.take() == ()
    assert "traceparent" not in gateway.headers()


async def test_a_mounted_application_knows_its_own_paths() -> None:
    gateway = Gateway(answers)
    await gateway.ask(root_path="/prefix")
    assert gateway.request().operation == "chat"


TRACE = b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"


async def test_the_clients_trace_is_gone_on_with() -> None:
    gateway = Gateway(answers)
    await gateway.ask(headers=[(b"traceparent", TRACE)])
    assert gateway.request().trace_id == "a" * 32
    assert gateway.headers()["traceparent"].startswith(f"00-{'a' * 32}-")


@pytest.mark.parametrize("headers", [[(b"traceparent", TRACE)] * 2, [(b"traceparent", b"x\r\nset-cookie: y")]])
async def test_what_is_no_one_traceparent_begins_a_trace(headers: Any) -> None:
    gateway = Gateway(answers)
    await gateway.ask(headers=headers)
    assert gateway.request().trace_id != "a" * 32
    assert "\r" not in gateway.headers()["traceparent"]


async def test_an_application_that_raises_is_recorded_and_still_raises() -> None:
    async def raises(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError

    gateway = Gateway(raises)
    with pytest.raises(RuntimeError):
        await gateway.ask()
    assert gateway.request().outcome == "disconnected"  # nothing was sent, so nobody was answered
    assert gateway.observe.in_flight == 0


async def test_a_request_that_the_server_cancels_is_recorded() -> None:
    begun = asyncio.Event()

    async def hangs(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    gateway = Gateway(hangs)
    asking = asyncio.create_task(gateway.ask())
    await begun.wait()
    assert gateway.observe.in_flight == 1
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert gateway.request().status == 499
    assert gateway.observe.in_flight == 0


async def test_an_error_after_the_first_byte_is_the_requests_and_not_the_responses() -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        await answers({}, receive, send)
        recording = recording_of(scope)
        assert recording is not None
        recording.fail(EngineDied("dead"))
        recording.leave()  # and then the client goes, too
        assert span_of(scope) is not None

    gateway = Gateway(fails)
    await gateway.ask()
    request = gateway.request()
    assert (request.status, request.error, request.outcome) == (503, "engine_died", "error")
    assert gateway.sent[0]["status"] == 200
