"""Spans on their way out: in the background, bounded, and counted. A receiver that is down costs no request anything.

The SDK's batch processor does the work; around it stands a count, because it drops in silence or a log line a span.
"""

import threading
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult


class SpanCounts:
    """Spans of this process since its start. Every one that has ended is exported, dropped, or still waits."""

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
        """So many that waited have been taken by the receiver, or are lost."""
        with self._lock:
            spans = min(spans, self._pending)
            self._pending -= spans
            if exported:
                self.exported += spans
            else:
                self.dropped += spans

    def abandon(self) -> None:
        """What still waits is lost."""
        self.settle(self._pending, exported=False)


class BoundedProcessor(SpanProcessor):
    """At most `max_queued` spans wait, those in the batch that is being sent included."""

    def __init__(self, exporter: SpanExporter, max_queued: int) -> None:
        self.counts = SpanCounts(max_queued)
        self._exporter = exporter
        self._batches = BatchSpanProcessor(_CountingExporter(exporter, self.counts), max_queue_size=max_queued)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """See `SpanProcessor`."""

    def on_end(self, span: ReadableSpan) -> None:
        """See `SpanProcessor`."""
        if self.counts.admit():
            self._batches.on_end(span)

    def shutdown(self, timeout_s: float = 3.0) -> None:
        """Sends what waits, and gives up after `timeout_s`: the SDK's own limits are 30 s and one more export."""
        flushing = threading.Thread(target=self._batches.shutdown, daemon=True)
        flushing.start()
        flushing.join(timeout_s)
        if flushing.is_alive():
            self._exporter.shutdown()  # ends its retries
        self.counts.abandon()

    def force_flush(self, timeout_millis: int | None = None) -> bool:
        """See `SpanProcessor`."""
        return self._batches.force_flush(timeout_millis)


class _CountingExporter(SpanExporter):
    def __init__(self, exporter: SpanExporter, counts: SpanCounts) -> None:
        self._exporter = exporter
        self._counts = counts

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._counts.settle(len(spans), exported=result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
