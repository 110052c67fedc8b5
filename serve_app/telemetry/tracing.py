"""One process's tracer: spans of hops and of their stages, from times that were measured elsewhere.

Its own provider, never OpenTelemetry's global one: what else runs in the process keeps its own. Nothing here raises
into the program, and where nothing is recorded nothing is made.
"""

import importlib.metadata
import os
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serve_app.config import TracingSection
from serve_app.messages import Stage
from serve_app.telemetry.export import BoundedProcessor

_MAX_TRACEPARENT = 512  # W3C: later versions may append fields, up to this length
_SAMPLED = "-01"
_propagator = TraceContextTextMapPropagator()

Attributes = Mapping[str, Any]


def start(config: TracingSection, hop: str, replica: str, model: str) -> "Tracing":
    """The process's tracer. Without an endpoint, here or in the environment, it records nothing."""
    exporter = _exporter(config)
    if exporter is None:
        return Tracing(None, None, config.capture_content)
    processor = BoundedProcessor(exporter, config.max_queued_spans)
    sampler = None if config.sample_ratio is None else ParentBased(TraceIdRatioBased(config.sample_ratio))
    provider = TracerProvider(sampler, _resource(hop, replica, model), shutdown_on_exit=False)
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
        """A hop's span, of kind SERVER.

        With `root` it starts a trace or goes on with the client's, if `traceparent` is a valid W3C header. Without, it
        is a child of `traceparent`, and no span at all where that is None or unsampled.
        """
        if not root and not self.records(traceparent):
            return HopSpan(None, None, traceparent)
        context = _parse(traceparent)
        if self._tracer is None:
            return HopSpan(None, None, _unrecorded(context))
        parent = trace.set_span_in_context(NonRecordingSpan(context)) if context else Context()
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=_ns(begin_s))
        own = span.get_span_context()
        return HopSpan(self, span, _format(own.trace_id, own.span_id, own.trace_flags))

    def records(self, traceparent: str | None) -> bool:
        """Whether a child of `traceparent` would be recorded."""
        return self._tracer is not None and traceparent is not None and traceparent.endswith(_SAMPLED)

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
        if self.records(traceparent) and (context := _parse(traceparent)) is not None:
            self.record_stage(NonRecordingSpan(context), stage, attributes, error, failed)

    def record_stage(
        self,
        parent: trace.Span,
        stage: Stage,
        attributes: Attributes | None = None,
        error: str | None = None,
        failed: bool = False,
    ) -> None:
        """A span as long as the stage was busy, so that summed work is not drawn as long as what it lies in."""
        assert self._tracer is not None
        shown = dict(attributes or {}) | ({"error.type": error} if error else {})
        if stage.count > 1 or stage.pieces:
            shown["tokenline.count"] = stage.count
            shown["tokenline.longest_s"] = stage.longest_s
            shown["tokenline.extent_s"] = stage.end_s - stage.begin_s
        context = trace.set_span_in_context(parent)
        span = self._tracer.start_span(
            stage.name, context, SpanKind.INTERNAL, _given(shown), start_time=_ns(stage.begin_s)
        )
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(_ns(min(stage.begin_s + stage.busy_s, stage.end_s)))

    def shutdown(self, timeout_s: float = 3.0) -> None:
        """Sends what waits, within `timeout_s` also where the receiver hangs. Blocks; may be called twice."""
        if self._processor is not None:
            self._processor.shutdown(timeout_s)


class HopSpan:
    """A hop's span while it is open.

    `traceparent` is what the next hop is told; `sampled` says whether anything is recorded.
    """

    __slots__ = ("_ended", "_span", "_tracing", "sampled", "traceparent")

    def __init__(self, tracing: Tracing | None, span: trace.Span | None, traceparent: str | None) -> None:
        self.traceparent = traceparent
        self.sampled = span is not None and span.is_recording()
        self._tracing = tracing
        self._span = span
        self._ended = False

    @property
    def trace_id(self) -> str | None:
        """32 hexadecimal digits."""
        return self.traceparent.split("-")[1] if self.traceparent else None

    def set(self, attributes: Attributes) -> None:
        """Attributes; those that are None are left out."""
        if self.sampled and self._span is not None:
            self._span.set_attributes(_given(attributes))

    def stages(self, stages: Iterable[Stage], attributes: Attributes | None = None) -> None:
        """A child span for each stage."""
        if self.sampled and self._span is not None and self._tracing is not None:
            for one in stages:
                self._tracing.record_stage(self._span, one, attributes)

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
        self._ended = True
        if error is not None:
            self.set({"error.type": error})
        if failed:
            self._span.set_status(Status(StatusCode.ERROR, description))
        self._span.end(_ns(end_s))


def _exporter(config: TracingSection) -> SpanExporter | None:
    """Imported where it is needed: gRPC costs a process 20 MB."""
    endpoint = config.endpoint or _from_environment("ENDPOINT")
    if not endpoint or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    protocol = config.protocol or _from_environment("PROTOCOL") or "grpc"
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc  # noqa: PLC0415

        return Grpc(config.endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http  # noqa: PLC0415

    url = config.endpoint
    if url is not None and not url.endswith("/v1/traces"):
        url = url.rstrip("/") + "/v1/traces"  # as the exporter does with the environment's, and not with an argument
    return Http(url)


def _from_environment(name: str) -> str | None:
    prefix = "OTEL_EXPORTER_OTLP"
    return os.environ.get(f"{prefix}_TRACES_{name}") or os.environ.get(f"{prefix}_{name}")


def _resource(hop: str, replica: str, model: str) -> Resource:
    own = Resource(
        {
            "service.name": hop,
            "service.namespace": "tokenline",
            "service.instance.id": replica,
            "service.version": importlib.metadata.version("tokenline"),
            "tokenline.model": model,
        }
    )
    return Resource.create().merge(own)


def _parse(traceparent: str | None) -> trace.SpanContext | None:
    """None for what is no W3C header."""
    if traceparent is None or len(traceparent) > _MAX_TRACEPARENT:
        return None
    context = trace.get_current_span(_propagator.extract({"traceparent": traceparent})).get_span_context()
    return context if context.is_valid else None


def _unrecorded(parent: trace.SpanContext | None) -> str:
    """A span that nobody records still has a name, for log lines and the response."""
    trace_id = parent.trace_id if parent is not None else secrets.randbits(128) or 1
    return _format(trace_id, secrets.randbits(64) or 1, TraceFlags.DEFAULT)


def _format(trace_id: int, span_id: int, flags: int) -> str:
    return f"00-{trace_id:032x}-{span_id:016x}-{'01' if flags & TraceFlags.SAMPLED else '00'}"


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1e9)


def _given(attributes: Attributes) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
