"""Spans on their way out: in the background, bounded, and counted. A receiver that is down costs no request anything.

The SDK's batch processor and its OTLP exporters do the work. Around them stands a count, because the SDK logs a line
for each span that its full queue drops, and tells nobody else.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from serve_app.config import TracingSection

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 20.0
_EXPORTERS_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)


def exporter_of(config: TracingSection) -> SpanExporter | None:
    """What sends spans to the receiver; None where the configuration and the environment name none.

    Raises ValueError for a protocol that there is no exporter for. What neither names (headers, certificates, time
    limits) the exporters read from the environment themselves; in Python's, OTEL_EXPORTER_OTLP_TIMEOUT is in seconds.
    Imported where it is needed: gRPC costs a process 20 MB.
    """
    if not (config.endpoint or _environment("ENDPOINT")) or _turned_off(config):
        return None
    protocol = config.protocol or _environment("PROTOCOL") or "grpc"
    if protocol not in ("grpc", "http/protobuf"):
        raise ValueError(f"the protocol {protocol} is neither grpc nor http/protobuf")
    for name in _EXPORTERS_LOGGERS:
        logging.getLogger(name).addFilter(_seldom)
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc  # noqa: PLC0415

        return Grpc(config.endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http  # noqa: PLC0415

    return Http(config.endpoint and traces_url(config.endpoint))


def traces_url(endpoint: str) -> str:
    """Where an HTTP receiver takes spans. The exporter completes the environment's base URL, but not an argument."""
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"


def _turned_off(config: TracingSection) -> bool:
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return disabled or (config.endpoint is None and os.environ.get("OTEL_TRACES_EXPORTER", "").strip() == "none")


def _environment(name: str) -> str | None:
    prefix = "OTEL_EXPORTER_OTLP"
    return os.environ.get(f"{prefix}_TRACES_{name}") or os.environ.get(f"{prefix}_{name}")


class Seldom(logging.Filter):
    """Lets one record through in 20 s: a receiver that is down fails every few seconds, for hours."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._silent_until_s = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        now_s = self._clock()
        if now_s < self._silent_until_s:
            return False
        self._silent_until_s = now_s + _LOG_EVERY_S
        return True


_seldom = Seldom()
logger.addFilter(_seldom)


class SpanCounts:
    """Sampled spans that have ended in this process, since its start: each is exported, dropped, or still pending."""

    def __init__(self, max_pending: int) -> None:
        self._lock = threading.Lock()
        self._max_pending = max_pending
        self._pending = 0
        self.exported = 0
        self.dropped = 0

    def admit(self) -> bool:
        """Whether one more may wait; if not, it is counted as dropped."""
        with self._lock:
            if self._pending >= self._max_pending:
                self.dropped += 1
                return False
            self._pending += 1
            return True

    def settle(self, spans: int, exported: bool) -> None:
        """So many that were pending have been taken by the receiver, or are lost."""
        with self._lock:
            spans = min(spans, self._pending)
            self._pending -= spans
            if exported:
                self.exported += spans
            else:
                self.dropped += spans

    def close(self) -> None:
        """What is pending counts as lost, as does everything from now on."""
        with self._lock:
            self.dropped += self._pending
            self._pending = self._max_pending = 0


class BoundedProcessor(SpanProcessor):
    """At most `max_queued` spans are pending, those of the batch that is being sent included.

    Delay and batch size are those of OTEL_BSP_SCHEDULE_DELAY and OTEL_BSP_MAX_EXPORT_BATCH_SIZE.
    """

    def __init__(self, exporter: SpanExporter, max_queued: int) -> None:
        self.counts = SpanCounts(max_queued)
        self._exporter = _CountingExporter(exporter, self.counts)
        self._batches = BatchSpanProcessor(
            self._exporter, max_queue_size=max_queued, max_export_batch_size=_batch_size(max_queued)
        )
        self._closing = threading.Lock()

    def on_end(self, span: ReadableSpan) -> None:
        """See `SpanProcessor`."""
        if span.context is not None and span.context.trace_flags.sampled and self.counts.admit():
            self._batches.on_end(span)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """See `SpanProcessor`."""

    def shutdown(self, timeout_s: float = 3.0) -> None:
        """Sends what is pending, and gives up after `timeout_s`: the SDK's own limits are 30 s and one more export."""
        if not self._closing.acquire(blocking=False):
            return
        flushing = threading.Thread(target=self._batches.shutdown, name="spans-flush", daemon=True)
        flushing.start()
        flushing.join(timeout_s)
        self._exporter.shutdown()
        self.counts.close()

    def force_flush(self, timeout_millis: int | None = None) -> bool:
        """See `SpanProcessor`. Ignores the time, as the SDK does."""
        return self._batches.force_flush(timeout_millis)


def _batch_size(max_queued: int) -> int | None:
    """The SDK refuses a batch that is larger than its queue. None leaves the SDK to its own reading."""
    wanted = os.environ.get("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "")
    return min(int(wanted), max_queued) if wanted.isdecimal() else None


class _CountingExporter(SpanExporter):
    """Counts what became of each batch. Once shut down it fails at once, so that no thread is held up."""

    def __init__(self, exporter: SpanExporter, counts: SpanCounts) -> None:
        self._exporter = exporter
        self._counts = counts
        self._closing = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            if not self._closing.locked():
                result = self._exporter.export(spans)
        except Exception:  # an exporter's own error costs its batch, and nothing else
            logger.warning("%d spans could not be exported", len(spans), exc_info=True)
        finally:
            self._counts.settle(len(spans), exported=result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        """Also ends the retries of an export that another thread is in."""
        if self._closing.acquire(blocking=False):
            self._exporter.shutdown()
