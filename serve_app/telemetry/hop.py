"""One hop's span around its work on a request, ended as the work ended. Knows nothing of what the work is."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from serve_app.errors import InternalError, RequestError
from serve_app.messages import RequestContext
from serve_app.telemetry.logs import bind
from serve_app.telemetry.tracing import HopSpan, Tracing

# `error.type` of a hop's span whose caller gave the request up: the gateway's span says why.
CANCELLED = "cancelled"


@contextmanager
def hop_span(tracing: Tracing, name: str, context: RequestContext) -> Iterator[HopSpan]:
    """The span of a hop that was sent `context`, from the moment it was sent: the hop's queue is inside."""
    bind(context.request_id, context.trace_id)
    now_s = time.time()
    begin_s = now_s if context.sent_s is None else min(context.sent_s, now_s)
    span = tracing.begin(name, traceparent=context.traceparent, begin_s=begin_s)
    try:
        yield span
    except (asyncio.CancelledError, GeneratorExit):
        span.end(error=CANCELLED)
        raise
    except RequestError as error:
        # What a refusal says of a field may quote it; a failure's sentence is ours.
        failed = error.status >= 500
        span.end(error=error.code, failed=failed, description=error.message if failed else None)
        raise
    except Exception:
        span.end(error=InternalError.code, failed=True)
        raise
    finally:
        span.end()
