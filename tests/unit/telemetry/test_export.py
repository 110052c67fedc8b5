"""Spans on their way to a receiver that is there, down, refusing, slow or wrong, and what the process counts of them.

That nothing waits for a receiver is shown by order, not by a clock: the spans have ended while it still holds its
answer, or before it was there.
"""

import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from receiver import Mode, Receiver

from serve_app.config import TracingSection
from serve_app.telemetry.export import BoundedProcessor, Seldom, SpanCounts, exporter_of, traces_url
from serve_app.telemetry.tracing import Tracing, start

Trace = Callable[..., Tracing]

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
QUEUE = 512
PROTOCOLS = pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])


def make_spans(tracing: Tracing, count: int) -> None:
    for _ in range(count):
        tracing.begin("x", traceparent=PARENT).end()


def at(receiver: Receiver, protocol: str) -> dict[str, Any]:
    return {"endpoint": receiver.grpc_url if protocol == "grpc" else receiver.http_url, "protocol": protocol}


def assembled(**config: Any) -> tuple[Tracing, BoundedProcessor]:
    """A tracer whose processor can be told to send now, so that no test waits for it."""
    exporter = exporter_of(TracingSection(**config))
    assert exporter is not None
    processor = BoundedProcessor(exporter, QUEUE)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return Tracing(provider, processor, False), processor


@PROTOCOLS
def test_what_the_receiver_took_is_counted(tracer: Trace, receiver: Receiver, protocol: str) -> None:
    tracing = tracer(**at(receiver, protocol))
    make_spans(tracing, 700)
    tracing.shutdown(30.0)
    assert (tracing.exported_spans, tracing.dropped_spans) == (700, 0)
    assert len(receiver.spans()) == 700


@PROTOCOLS
def test_a_slow_receiver_holds_nobody_up_and_what_does_not_fit_is_counted(
    tracer: Trace, receiver: Receiver, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.mode = "slow"
    tracing = tracer(max_queued_spans=QUEUE, **at(receiver, protocol))
    make_spans(tracing, 1)
    receiver.wait_asked(0)
    make_spans(tracing, 2000)
    assert receiver.spans() == []  # it still has not answered
    assert (tracing.exported_spans, tracing.dropped_spans) == (0, 2001 - QUEUE)
    receiver.mode = "normal"
    receiver.wait_for(QUEUE)
    tracing.shutdown(30.0)
    assert (tracing.exported_spans, tracing.dropped_spans) == (QUEUE, 2001 - QUEUE)
    assert len(receiver.spans()) == QUEUE
    assert len(caplog.records) <= 1


@PROTOCOLS
@pytest.mark.parametrize("mode", ["refuse", "refuse_for_good"])
def test_what_a_receiver_refuses_is_counted_as_lost(
    tracer: Trace, receiver: Receiver, protocol: str, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")  # less than the first wait before a second attempt
    receiver.mode = mode
    tracing = tracer(**at(receiver, protocol))
    make_spans(tracing, 20)
    tracing.shutdown(30.0)
    assert (tracing.exported_spans, tracing.dropped_spans) == (0, 20)
    assert receiver.spans() == []
    assert receiver.asked >= 1


@PROTOCOLS
@pytest.mark.parametrize("batches_lost", [1, 5])
def test_a_receiver_that_comes_back_is_found_at_the_first_attempt(
    receiver: Receiver, protocol: str, batches_lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    tracing, processor = assembled(**at(receiver, protocol))
    make_spans(tracing, 1)
    processor.force_flush()
    receiver.stop()
    for _ in range(batches_lost):
        make_spans(tracing, 1)
        processor.force_flush()
    assert (tracing.exported_spans, tracing.dropped_spans) == (1, batches_lost)
    receiver.start()
    make_spans(tracing, 1)
    processor.force_flush()
    assert (tracing.exported_spans, tracing.dropped_spans) == (2, batches_lost)
    tracing.shutdown()


@PROTOCOLS
def test_spans_of_a_short_outage_arrive(tracer: Trace, receiver: Receiver, protocol: str) -> None:
    receiver.stop()
    tracing = tracer(**at(receiver, protocol))
    make_spans(tracing, 20)
    receiver.start()
    receiver.wait_for(20)
    tracing.shutdown(30.0)
    assert (tracing.exported_spans, tracing.dropped_spans) == (20, 0)


@PROTOCOLS
@pytest.mark.timeout(20)  # the SDK's own limit is 30 s
@pytest.mark.parametrize("trouble", ["down", "refuse", "slow"])
def test_shutdown_gives_up_and_the_count_is_exact(
    tracer: Trace, receiver: Receiver, protocol: str, trouble: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    if trouble == "down":
        receiver.stop()
    else:
        receiver.mode = trouble
    tracing = tracer(max_queued_spans=QUEUE, **at(receiver, protocol))
    make_spans(tracing, 3 * QUEUE)
    tracing.shutdown(0.2)
    assert (tracing.exported_spans, tracing.dropped_spans) == (0, 3 * QUEUE)
    tracing.shutdown()
    make_spans(tracing, 1)
    assert (tracing.exported_spans, tracing.dropped_spans) == (0, 3 * QUEUE + 1)
    receiver.mode = "normal"  # lets the held answer go; it comes too late to count
    assert tracing.exported_spans == 0


@PROTOCOLS
def test_a_receiver_that_is_down_fills_no_log(
    receiver: Receiver, protocol: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    receiver.stop()
    tracing, processor = assembled(**at(receiver, protocol))
    for _ in range(5):
        make_spans(tracing, 1)
        processor.force_flush()
    tracing.shutdown()
    assert tracing.dropped_spans == 5
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) <= 1


@pytest.mark.parametrize("names", [("ENDPOINT", "PROTOCOL"), ("TRACES_ENDPOINT", "TRACES_PROTOCOL")])
@PROTOCOLS
def test_the_environment_alone_configures_it(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, protocol: str, names: tuple[str, str]
) -> None:
    path = "/v1/traces" if protocol != "grpc" and names[0].startswith("TRACES") else ""
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{names[0]}", f"{at(receiver, protocol)['endpoint']}{path}")
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{names[1]}", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    tracing = start(TracingSection(), "gateway", "g", "m")
    make_spans(tracing, 3)
    tracing.shutdown(30.0)
    assert len(receiver.spans()) == 3
    assert receiver.headers["x-key"] == "secret"


def test_the_signals_own_variable_comes_first(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", receiver.grpc_url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    tracing = start(TracingSection(), "gateway", "g", "m")
    make_spans(tracing, 1)
    tracing.shutdown(30.0)
    assert tracing.exported_spans == 1


def test_the_configuration_comes_before_the_environment(
    tracer: Trace, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    tracing = tracer(**at(receiver, "grpc"))
    make_spans(tracing, 1)
    tracing.shutdown(30.0)
    assert tracing.exported_spans == 1


@pytest.mark.parametrize("variable", ["OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"])
def test_the_environment_can_turn_it_off(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(variable, "true" if variable == "OTEL_SDK_DISABLED" else "none")
    assert exporter_of(TracingSection()) is None


def test_a_protocol_without_an_exporter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ValueError, match="http/json"):
        exporter_of(TracingSection(endpoint="http://127.0.0.1:1"))


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://jaeger:4318", "http://jaeger:4318/v1/traces"),
        ("http://jaeger:4318/", "http://jaeger:4318/v1/traces"),
        ("https://vendor/otlp", "https://vendor/otlp/v1/traces"),
        ("http://jaeger:4318/v1/traces", "http://jaeger:4318/v1/traces"),
        ("http://jaeger:4318/v1/traces/", "http://jaeger:4318/v1/traces"),
    ],
)
def test_a_base_url_is_completed(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


def test_a_process_without_an_endpoint_imports_no_grpc() -> None:
    program = (
        "import sys; from serve_app.config import TracingSection; from serve_app.telemetry.tracing import start;"
        "start(TracingSection(), 'gateway', 'g', 'm').begin('x', traceparent=None, root=True).end();"
        "assert not [name for name in ('grpc', 'requests', 'opentelemetry.exporter') if name in sys.modules]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_batch_size_beyond_the_queue_is_cut(
    tracer: Trace, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100000")
    tracing = tracer(max_queued_spans=QUEUE)
    make_spans(tracing, QUEUE)
    tracing.shutdown(30.0)
    assert tracing.exported_spans == QUEUE


class Broken(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise RuntimeError("a fault of its own")


def test_an_exporter_that_raises_costs_its_batch_and_nothing_else() -> None:
    processor = BoundedProcessor(Broken(), QUEUE)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    for _ in range(3):
        provider.get_tracer("x").start_span("x").end()
    processor.shutdown(30.0)
    assert (processor.counts.exported, processor.counts.dropped) == (0, 3)


def test_counts_add_up_whatever_happens() -> None:
    counts = SpanCounts(2)
    assert [counts.admit() for _ in range(3)] == [True, True, False]
    counts.settle(1, exported=True)
    assert counts.admit()
    counts.close()
    counts.settle(2, exported=True)  # an answer after the end
    assert not counts.admit()
    assert (counts.exported, counts.dropped) == (1, 4)


def test_one_line_in_twenty_seconds() -> None:
    seconds = iter(range(50))
    seldom = Seldom(lambda: next(seconds))
    record = logging.LogRecord("x", logging.WARNING, __file__, 1, "down", None, None)
    passed = [seldom.filter(record) for _ in range(50)]
    assert [second for second, one in enumerate(passed) if one] == [0, 20, 40]
