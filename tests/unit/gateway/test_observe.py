"""One record, one span and one log line for each request of the API, however it ends, and none for other routes."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from serve_app.config import InsightSection
from serve_app.errors import EngineDied
from serve_app.gateway import respond
from serve_app.gateway.observe import OPERATIONS, ObserveMiddleware, Telemetry, recording_of, span_of
from serve_app.gateway.respond import GeneratedResponse
from serve_app.insight.service import InsightService
from serve_app.messages import RequestContext, RequestMetrics
from serve_app.telemetry.names import GATEWAY, WRITE
from serve_app.telemetry.outbox import Outbox
from serve_app.telemetry.traceparent import Ids
from serve_app.telemetry.tracing import Tracing

CHAT = "/v1/chat/completions"
Inner = Callable[[Any, Any, Any], Awaitable[None]]


class Gateway:
    """The middleware around an inner application, its client, and what it left behind.

    `gone` makes the client leave; one that does not read blocks whoever sends to it.
    """

    def __init__(self, inner: Inner, reads: bool = True) -> None:
        self.outbox = Outbox()
        self.gone = asyncio.Event()
        self.got_body = asyncio.Event()
        self.sent: list[Any] = []
        self._reads = reads
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False, id_generator=Ids())
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        telemetry = Telemetry(Tracing(provider, None, False), self.outbox, InsightService(InsightSection()))
        self.observe = ObserveMiddleware(inner, "m", telemetry)

    async def ask(self, path: str = CHAT, method: str = "POST", headers: Any = (), root_path: str = "") -> None:
        async def receive() -> Any:
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent.append(message)
            if message.get("body"):
                self.got_body.set()
                if not self._reads:
                    await asyncio.Event().wait()

        scope = {
            "type": "http",
            "method": method,
            "path": root_path + path,
            "root_path": root_path,
            "headers": list(headers),
            "tokenline.request_id": "the-id",
        }
        await self.observe(scope, receive, send)

    def request(self) -> RequestMetrics:
        (request,) = self.outbox.take()
        return request

    def span(self) -> ReadableSpan:
        """The server span, of which there must be one; all others lie within it."""
        spans = self._exporter.get_finished_spans()
        (server,) = [one for one in spans if one.name == GATEWAY]
        assert all(server.start_time <= one.start_time <= one.end_time <= server.end_time for one in spans)
        return server

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
    assert gateway.span().attributes["tokenline.outcome"] == "ok"
    assert gateway.observe.in_flight == 0


@pytest.mark.parametrize(("path", "method"), [("/health", "GET"), (CHAT, "GET"), ("/v1/models", "POST"), ("/", "POST")])
async def test_other_routes_pass_as_they_are(path: str, method: str) -> None:
    gateway = Gateway(answers)
    await gateway.ask(path, method)
    assert gateway.outbox.take() == ()
    assert "traceparent" not in gateway.headers()
    assert gateway.observe.in_flight == 0


async def test_what_is_no_http_passes_as_it_is() -> None:
    seen: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    gateway = Gateway(inner)
    await gateway.observe({"type": "websocket", "path": CHAT}, asyncio.Event().wait, inner)  # type: ignore[arg-type]
    assert seen == [{"type": "websocket", "path": CHAT}]
    assert gateway.outbox.take() == ()


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


async def test_the_response_has_one_traceparent_and_it_is_ours() -> None:
    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"traceparent", b"theirs")]})

    gateway = Gateway(inner)
    await gateway.ask()
    assert [value for name, value in gateway.sent[0]["headers"] if name == b"traceparent"] != [b"theirs"]
    assert len(gateway.sent[0]["headers"]) == 1


@pytest.mark.parametrize(
    "headers",
    [
        [(b"traceparent", TRACE)] * 2,
        [(b"traceparent", TRACE), (b"traceparent", b"")],
        [(b"traceparent", b"x\r\nset-cookie: y")],
        [(b"traceparent", TRACE + b"\r\nset-cookie: y")],
        [(b"traceparent", b"\xff" * 55)],
        [(b"traceparent", b"")],
        [(b"traceparent", b"0" * 100_000)],
    ],
)
async def test_what_is_no_one_traceparent_begins_a_trace(headers: Any) -> None:
    gateway = Gateway(answers)
    await gateway.ask(headers=headers)
    assert gateway.request().trace_id != "a" * 32
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", gateway.headers()["traceparent"])
    assert gateway.span().parent is None


# How requests end.


async def test_an_application_that_raises_is_recorded_as_an_error_and_still_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def raises(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("of the user's words")

    gateway = Gateway(raises)
    with caplog.at_level(logging.INFO, "serve_app.gateway.observe"), pytest.raises(RuntimeError):
        await gateway.ask()
    request = gateway.request()
    assert (request.outcome, request.error, request.status) == ("error", "internal_error", 500)
    assert gateway.span().attributes["error.type"] == "internal_error"
    (line,) = caplog.records
    assert "words" not in repr((line.fields, gateway.span().attributes, gateway.span().status.description))
    assert gateway.observe.in_flight == 0


@pytest.mark.parametrize("first", [b"", b"data: 1\n\n"])
async def test_a_request_that_the_server_cancels_was_not_answered(
    first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    begun = asyncio.Event()

    async def hangs(scope: Any, receive: Any, send: Any) -> None:
        if first:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": first, "more_body": True})
        begun.set()
        await asyncio.Event().wait()

    gateway = Gateway(hangs)
    asking = asyncio.create_task(gateway.ask())
    await begun.wait()
    assert gateway.observe.in_flight == 1
    asking.cancel()
    with caplog.at_level(logging.INFO, "serve_app.gateway.observe"), pytest.raises(asyncio.CancelledError):
        await asking
    request = gateway.request()
    assert (request.status, request.outcome, request.error) == (499, "disconnected", "client_disconnected")
    assert gateway.span().attributes["error.type"] == "client_disconnected"
    assert len(caplog.records) == 1
    assert gateway.observe.in_flight == 0


async def test_a_request_that_is_cancelled_once_it_is_whole_was_answered() -> None:
    answered = asyncio.Event()

    async def lingers(scope: Any, receive: Any, send: Any) -> None:
        await answers(scope, receive, send)
        answered.set()
        await asyncio.Event().wait()

    gateway = Gateway(lingers)
    asking = asyncio.create_task(gateway.ask())
    await answered.wait()
    asking.cancel()
    await asyncio.wait([asking])
    assert gateway.request().outcome == "ok"


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
    assert gateway.span().attributes["http.response.status_code"] == 200


def generates(items: list[Any], remaining_s: float = 60.0, whole_after: int | None = None) -> Inner:
    """An application whose stream gives these bytes, raises these errors and hangs at a None."""

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        recording = recording_of(scope)
        assert recording is not None

        async def chunks() -> AsyncGenerator[bytes, None]:
            for number, item in enumerate(items):
                recording.whole = number == whole_after
                if item is None:
                    await asyncio.Event().wait()
                if isinstance(item, Exception):
                    raise item
                yield item

        context = RequestContext("the-id", time.time() + remaining_s)
        await GeneratedResponse(chunks(), True, context, recording)(scope, receive, send)

    return inner


@pytest.mark.parametrize("items", [[None], [b"data: 1\n\n", None]])
async def test_a_client_that_leaves_was_not_answered(items: list[Any]) -> None:
    gateway = Gateway(generates(items))
    asking = asyncio.create_task(gateway.ask())
    if len(items) > 1:
        await gateway.got_body.wait()
    gateway.gone.set()
    await asking
    request = gateway.request()
    assert (request.status, request.outcome) == (499, "disconnected")
    assert gateway.span().status.is_unset
    assert gateway.observe.in_flight == 0


async def test_a_client_that_leaves_once_it_has_all_was_answered() -> None:
    gateway = Gateway(generates([b"data: [DONE]\n\n", None], whole_after=1))
    asking = asyncio.create_task(gateway.ask())
    await gateway.got_body.wait()
    gateway.gone.set()
    await asking
    request = gateway.request()
    assert (request.status, request.outcome) == (200, "ok")
    assert request.ended_s == request.stages[-1].end_s  # not when the rest of the path had ended


async def test_what_fails_behind_a_whole_answer_is_not_its_clients() -> None:
    gateway = Gateway(generates([b"data: [DONE]\n\n", EngineDied("dead")], whole_after=1))
    await gateway.ask()
    assert gateway.request().outcome == "ok"
    assert b"".join(message.get("body", b"") for message in gateway.sent) == b"data: [DONE]\n\n"
    assert gateway.sent[-1]["more_body"] is False


async def test_a_client_that_does_not_read_until_its_deadline_was_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(respond, "_LAST_WORD_S", 0.0)
    gateway = Gateway(generates([b"data: 1\n\n"], remaining_s=0.0), reads=False)
    # The deadline has passed already; it is kept once the client has a first piece.
    monkeypatch.setattr(respond.asyncio, "wait", waits_for(gateway.got_body))
    await gateway.ask()
    request = gateway.request()
    assert (request.status, request.outcome, request.error) == (504, "timeout", "deadline_exceeded")
    assert [message["type"] for message in gateway.sent] == ["http.response.start", "http.response.body"]
    assert gateway.observe.in_flight == 0


def waits_for(event: asyncio.Event) -> Any:
    """`asyncio.wait`, whose time is over once the event is set."""

    async def wait(tasks: Any, timeout: float | None, return_when: str) -> Any:  # noqa: ASYNC109
        await event.wait()
        return set(), set(tasks)

    return wait


async def test_an_error_amid_a_stream_is_recorded_and_its_words_are_in_no_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gateway = Gateway(generates([b"data: 1\n\n", EngineDied("of the user's words")]))
    with caplog.at_level(logging.INFO, "serve_app"):
        await gateway.ask()
    assert gateway.request().error == "engine_died"
    (line,) = caplog.records
    assert "words" not in repr(line.__dict__)


async def test_each_piece_of_the_body_is_timed() -> None:
    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for body in (b"", b"one", b"two", b""):
            await send({"type": "http.response.body", "body": body, "more_body": True})

    gateway = Gateway(inner)
    before_s = time.time()
    await gateway.ask()
    request = gateway.request()
    (writing,) = request.stages
    assert (writing.name, writing.count, len(writing.pieces)) == (WRITE, 2, 2)
    assert before_s <= writing.begin_s <= request.first_write_s <= writing.end_s <= request.ended_s
    assert request.first_write_s == writing.pieces[0][1]


async def test_two_requests_at_the_same_time_do_not_mix() -> None:
    gateway = Gateway(generates([b"data: 1\n\n", None]))
    asking = [asyncio.create_task(gateway.ask(path)) for path in (CHAT, "/v1/completions")]
    await gateway.got_body.wait()
    assert gateway.observe.in_flight == 2
    gateway.gone.set()
    await asyncio.gather(*asking)
    assert {one.operation for one in gateway.outbox.take()} == {"chat", "text_completion"}
    assert gateway.observe.in_flight == 0
