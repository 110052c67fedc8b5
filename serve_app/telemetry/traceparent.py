"""W3C Trace Context: reads and writes the header `traceparent`, and makes ids. Knows nothing of what is traced."""

import functools
import secrets

from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import SpanContext, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

# The propagator logs a line for each longer one: a client must not be able to fill the log.
_MAX_CHARACTERS = 512
_propagator = TraceContextTextMapPropagator()


class Ids(IdGenerator):
    """From the system's randomness: what seeds Python's `random`, as engines do, would repeat a replica's ids."""

    def generate_trace_id(self) -> int:
        """128 bits, never 0, which W3C calls invalid."""
        return secrets.randbits(128) or 1

    def generate_span_id(self) -> int:
        """64 bits, never 0."""
        return secrets.randbits(64) or 1


def parse(traceparent: str | None) -> SpanContext | None:
    """None for what is no valid header. Versions to come are read as far as this one goes, as W3C demands."""
    return None if traceparent is None or len(traceparent) > _MAX_CHARACTERS else _parse(traceparent)


@functools.lru_cache(maxsize=256)  # an engine makes several spans of one header; the propagator takes 10 us
def _parse(traceparent: str) -> SpanContext | None:
    context = get_current_span(_propagator.extract({"traceparent": traceparent})).get_span_context()
    return context if context.is_valid else None


def write(context: SpanContext) -> str:
    """The header that makes the receiver's span a child of this one."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def is_sampled(traceparent: str | None) -> bool:
    """Whether a header that `write` made says that its trace is recorded. Costs no parsing."""
    return traceparent is not None and traceparent[-1:] in _ODD_DIGITS


def unrecorded(parent: SpanContext | None, ids: IdGenerator) -> SpanContext:
    """A span that nobody records: it still has an id, for log lines and the response."""
    trace_id = ids.generate_trace_id() if parent is None else parent.trace_id
    return SpanContext(trace_id, ids.generate_span_id(), is_remote=False, trace_flags=TraceFlags(TraceFlags.DEFAULT))


# The lowest bit of the flags is `sampled`.
_ODD_DIGITS = frozenset("13579bdf")
