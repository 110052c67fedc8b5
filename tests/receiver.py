"""A real OTLP receiver for tests: gRPC and HTTP, with the official protobufs, on free loopback ports.

It can be told to refuse, to hold its answers, or to be down, and to come back.
"""

import gzip
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, Self

import grpc  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

Mode = Literal["normal", "refuse", "refuse_for_good", "slow"]

_KINDS = {
    Span.SPAN_KIND_INTERNAL: "internal",
    Span.SPAN_KIND_SERVER: "server",
    Span.SPAN_KIND_CLIENT: "client",
    Span.SPAN_KIND_PRODUCER: "producer",
    Span.SPAN_KIND_CONSUMER: "consumer",
}
_STATUSES = {Status.STATUS_CODE_UNSET: "unset", Status.STATUS_CODE_OK: "ok", Status.STATUS_CODE_ERROR: "error"}


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as it came; ids in hexadecimal, times in seconds of the wall clock."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    kind: str
    service: str
    start_s: float
    end_s: float
    status: str
    status_message: str
    trace_state: str
    attributes: dict[str, Any] = field(hash=False)
    resource: dict[str, Any] = field(hash=False)


class Receiver:
    """Runs from `with` to the end of its block. `mode` may be changed at any time.

    refuse: for now, which the exporters try again (UNAVAILABLE, 503). refuse_for_good: PERMISSION_DENIED, 400.
    slow: each answer waits `slow_s`, or until the mode is another or the receiver stops.
    """

    def __init__(self) -> None:
        self.slow_s = 60.0
        self.asked = 0  # export requests, taken or not
        self.headers: dict[str, str] = {}  # of the last one
        self._mode: Mode = "normal"
        self._arrived = threading.Condition()
        self._spans: list[ReceivedSpan] = []
        self._up = False
        self._grpc_port = self._http_port = 0
        self._grpc: Any = None
        self._http: ThreadingHTTPServer | None = None

    @property
    def mode(self) -> Mode:
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        with self._arrived:
            self._mode = mode
            self._arrived.notify_all()

    @property
    def grpc_url(self) -> str:
        return f"http://127.0.0.1:{self._grpc_port}"

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self._http_port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """On the same ports as before, if it ran before."""
        self._up = True
        self._grpc = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        add_TraceServiceServicer_to_server(_Servicer(self), self._grpc)  # type: ignore[no-untyped-call]
        self._grpc_port = self._grpc.add_insecure_port(f"127.0.0.1:{self._grpc_port}")
        self._grpc.start()
        self._http = ThreadingHTTPServer(("127.0.0.1", self._http_port), _handler(self))
        self._http.daemon_threads = True
        self._http_port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """As if it had died: connections are cut, and whoever waits for an answer gets none."""
        with self._arrived:
            self._up = False
            self._arrived.notify_all()
        if self._grpc is not None:
            self._grpc.stop(None).wait(5)
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
        self._grpc = self._http = None

    def spans(self) -> list[ReceivedSpan]:
        """What came, by start."""
        with self._arrived:
            return sorted(self._spans, key=lambda one: one.start_s)

    def clear(self) -> None:
        """Forgets what came."""
        with self._arrived:
            self._spans.clear()

    def wait_for(self, condition: Callable[[list[ReceivedSpan]], bool] | int, timeout_s: float = 20.0) -> None:
        """Returns once the spans fulfil the condition, or are so many; fails after `timeout_s`."""
        wanted = condition
        check = (lambda spans: len(spans) >= wanted) if isinstance(wanted, int) else wanted
        with self._arrived:
            fulfilled = self._arrived.wait_for(lambda: check(self._spans), timeout_s)
            assert fulfilled, (
                f"not within {timeout_s} s; here: {sorted((one.trace_id, one.name) for one in self._spans)}"
            )

    def take(self, request: ExportTraceServiceRequest, headers: Iterable[tuple[str, str]]) -> bool:
        """Whether the spans are taken; only then are they kept."""
        with self._arrived:
            self.asked += 1
            self.headers = {name.lower(): value for name, value in headers}
            self._arrived.notify_all()
            self._arrived.wait_for(lambda: self._mode != "slow" or not self._up, self.slow_s)
            if not self._up or self._mode.startswith("refuse"):
                return False
            self._spans.extend(_read(request))
            self._arrived.notify_all()
        return True

    def wait_asked(self, more_than: int, timeout_s: float = 20.0) -> None:
        """Returns once there were more export requests than that."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: self.asked > more_than, timeout_s), "nobody exported"


class _Servicer(TraceServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:
        if not self._receiver.take(request, context.invocation_metadata()):
            code = grpc.StatusCode.PERMISSION_DENIED if self._receiver.mode == "refuse_for_good" else None
            context.abort(code or grpc.StatusCode.UNAVAILABLE, "refused")
        return ExportTraceServiceResponse()


def _handler(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            raw = gzip.decompress(raw) if self.headers.get("content-encoding") == "gzip" else raw
            if self.path != "/v1/traces":
                status = 404
            elif receiver.take(ExportTraceServiceRequest.FromString(raw), self.headers.items()):
                status = 200
            else:
                status = 400 if receiver.mode == "refuse_for_good" else 503
            body = ExportTraceServiceResponse().SerializeToString()
            self.send_response(status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on standard error."""

    return Handler


def _read(request: ExportTraceServiceRequest) -> list[ReceivedSpan]:
    received = []
    for group in request.resource_spans:
        resource = _attributes(group.resource.attributes)
        for span in (span for scope in group.scope_spans for span in scope.spans):
            received.append(
                ReceivedSpan(
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex() or None,
                    name=span.name,
                    kind=_KINDS[span.kind],
                    service=str(resource["service.name"]),
                    start_s=span.start_time_unix_nano / 1e9,
                    end_s=span.end_time_unix_nano / 1e9,
                    status=_STATUSES[span.status.code],
                    status_message=span.status.message,
                    trace_state=span.trace_state,
                    attributes=_attributes(span.attributes),
                    resource=resource,
                )
            )
    return received


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
