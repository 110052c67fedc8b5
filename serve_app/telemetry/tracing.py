"""One process's tracer: spans of hops and of their stages, from times that were measured elsewhere.

Its own provider, never OpenTelemetry's global one: what else runs in the process keeps its own. Nothing here raises
into the program, and where nothing is recorded nothing is made.
"""

import contextlib
import importlib.metadata
import logging
from collections.abc import Iterable
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, set_span_in_context

from serve_app.config import TracingSection
from serve_app.messages import Stage
from serve_app.telemetry.export import BoundedProcessor, exporter_of
from serve_app.telemetry.span_values import Attributes, clean, nanoseconds, not_before, summed, text
from serve_app.telemetry.traceparent import Ids, is_sampled, parse, unrecorded, write

logger = logging.getLogger(__name__)

_ids = Ids()


def start(config: TracingSection, hop: str, replica: str, model: str) -> "Tracing":
    """The process's tracer. Without an endpoint, here or in the environment, it records nothing."""
    try:
        exporter = exporter_of(config)
        if exporter is None:
            return Tracing(None, None, config.capture_content)
        sampler = None if config.sample_ratio is None else ParentBased(TraceIdRatioBased(config.sample_ratio))
        resource = _resource(hop, replica, model)
        provider = TracerProvider(sampler, resource, shutdown_on_exit=False, id_generator=_ids)
        processor = BoundedProcessor(exporter, config.max_queued_spans)
    except Exception:  # a wrong OTEL_* variable, or a certificate that is missing, stops no replica
        logger.exception("tracing is off in this process")
        return Tracing(None, None, config.capture_content)
    provider.add_span_processor(processor)
    return Tracing(provider, processor, config.capture_content)


class Tracing:
    """See `start`. `capture_content` says whether prompts and completions may be on spans."""

    def __init__(
        self, provider: TracerProvider | None, processor: BoundedProcessor | None, capture_content: bool
    ) -> None:
        self.capture_content = capture_content
        self._processor = processor
        self._tracer = None if provider is None else provider.get_tracer("tokenline")

    @property
    def exported_spans(self) -> int:
        """Taken by the receiver since the start of the process."""
        return 0 if self._processor is None else self._processor.counts.exported

    @property
    def dropped_spans(self) -> int:
        """Lost since then: the queue was full, or the receiver did not take them."""
        return 0 if self._processor is None else self._processor.counts.dropped

    def begin(
        self, name: str, *, traceparent: str | None, begin_s: float | None = None, root: bool = False
    ) -> "HopSpan":
        """A hop's span, of kind SERVER; without `begin_s`, seconds of the wall clock, it begins now.

        With `root` it starts a trace or goes on with the client's, if `traceparent` is a valid W3C header. Without, it
        is a child of `traceparent`, and no span at all where that is None or unsampled.
        """
        if not root and not self.records(traceparent):
            return HopSpan(None, None, traceparent)
        parent = parse(traceparent)
        if self._tracer is None:
            return HopSpan(None, None, write(unrecorded(parent, _ids)))
        if parent is None and not root:
            return HopSpan(None, None, traceparent)
        span = self._tracer.start_span(name, _beneath(parent), SpanKind.SERVER, start_time=nanoseconds(begin_s))
        return HopSpan(self, span if isinstance(span, ReadableSpan) else None, write(span.get_span_context()))

    def records(self, traceparent: str | None) -> bool:
        """Whether a child of `traceparent` would be recorded."""
        return self._tracer is not None and is_sampled(traceparent)

    def stage(
        self,
        traceparent: str | None,
        stage: Stage,
        attributes: Attributes | None = None,
        *,
        error: str | None = None,
        failed: bool = False,
    ) -> None:
        """One stage as a child of `traceparent`; nothing where that is not recorded. Errors as in `HopSpan.end`."""
        if self.records(traceparent) and (parent := parse(traceparent)) is not None:
            self.record_stage(_beneath(parent), stage, attributes, error, failed)

    def record_stage(
        self,
        parent: Context,
        stage: Stage,
        attributes: Attributes | None = None,
        error: str | None = None,
        failed: bool = False,
    ) -> None:
        """A span as long as the stage was busy, so that summed work is not drawn as long as what it lies in."""
        if self._tracer is None:
            return
        begin_ns = nanoseconds(stage.begin_s)
        span = self._tracer.start_span(stage.name, parent, SpanKind.INTERNAL, start_time=begin_ns)
        span.set_attributes(clean({**(attributes or {}), **summed(stage), "error.type": error}))
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(not_before(begin_ns, nanoseconds(min(stage.begin_s + stage.busy_s, stage.end_s))))

    def shutdown(self, timeout_s: float = 3.0) -> None:
        """Sends what waits, within `timeout_s` also where the receiver hangs. Blocks; may be called twice."""
        if self._processor is not None:
            self._processor.shutdown(timeout_s)


class HopSpan:
    """A hop's span while it is open.

    `traceparent` is what the next hop is told; `sampled` says whether anything is recorded.
    """

    __slots__ = ("_ended", "_span", "_tracing", "sampled", "traceparent")

    def __init__(self, tracing: Tracing | None, span: Any, traceparent: str | None) -> None:
        self.traceparent = traceparent
        self.sampled = span is not None
        self._tracing = tracing
        self._span = span
        self._ended = False

    @property
    def trace_id(self) -> str | None:
        """32 hexadecimal digits; None outside a trace."""
        return self.traceparent[3:35] if self.traceparent else None

    def set(self, attributes: Attributes) -> None:
        """Attributes; those that are None are left out."""
        if self._span is not None and not self._ended:
            self._span.set_attributes(clean(attributes))

    def stages(self, stages: Iterable[Stage], attributes: Attributes | None = None) -> None:
        """A child span for each stage."""
        if self._span is not None and self._tracing is not None:
            parent = set_span_in_context(self._span, Context())
            for one in stages:
                self._tracing.record_stage(parent, one, attributes)

    def end(
        self,
        end_s: float | None = None,
        *,
        error: str | None = None,
        failed: bool = False,
        description: str | None = None,
    ) -> None:
        """Ends it, now or at `end_s`; a second time does nothing.

        `error` is `error.type`. Only with `failed` is the span's status an error: what a client got wrong is none of
        the server's (OpenTelemetry's HTTP conventions).
        """
        if self._ended or self._span is None:
            return
        self.set({"error.type": error})
        self._ended = True
        if failed:
            self._span.set_status(Status(StatusCode.ERROR, description and text(description)))
        self._span.end(not_before(self._span.start_time, nanoseconds(end_s)))


def _resource(hop: str, replica: str, model: str) -> Resource:
    own = {
        "service.name": hop,
        "service.namespace": "tokenline",
        "service.instance.id": replica,
        "tokenline.model": model,
    }
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a checkout that was never installed
        own["service.version"] = importlib.metadata.version("tokenline")
    return Resource.create().merge(Resource(own))


def _beneath(parent: SpanContext | None) -> Context:
    """Never OpenTelemetry's current context: it belongs to whoever else traces in this process."""
    return Context() if parent is None else set_span_in_context(NonRecordingSpan(parent), Context())
