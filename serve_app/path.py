"""The whole path of a request, in order.

    HTTP ─▶ gateway ─▶ tokenizer ─▶ gateway ─▶ postprocess ─▶ engine
    HTTP ◀─ gateway ◀──── ready bytes ──── postprocess ◀─ token ids ─ engine       over the token channel

The gateway calls `answer`; what stands behind the two clients is Ray Serve handles in a cluster
(`deployments/handles.py`) and plain objects in tests. The third hop is `PostprocessService.generate`, which runs each
choice on the engine.
"""

import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from serve_app.aio import Sink, pulled, within
from serve_app.gateway.inbound import Inbound
from serve_app.gateway.recording import Recording
from serve_app.gateway.respond import with_timings
from serve_app.messages import (
    Closing,
    Detokenized,
    GenerateRequest,
    PathReport,
    RequestContext,
    TokenIds,
    Tokenized,
    TokenizeRequest,
)

# The hops keep the deadline themselves; those that do have this long to say where the time went.
_LAST_REPORT_S = 0.25


class TokenizerClient(Protocol):
    """The tokenizer hop as the gateway sees it. Raises RequestError."""

    async def tokenize(self, request: TokenizeRequest) -> Tokenized: ...

    async def detokenize(self, context: RequestContext, ids: TokenIds) -> Detokenized: ...


class PostprocessClient(Protocol):
    """The postprocess hop as the gateway sees it. Cancelling `generate` cancels the request in every hop behind it."""

    async def generate(self, request: GenerateRequest, sink: Sink[bytes | Closing]) -> None: ...

    async def report(self) -> PathReport: ...


@dataclass(frozen=True)
class Hops:
    """What the gateway calls. `max_backlog_items` of an answer may wait for a client that does not read."""

    tokenizer: TokenizerClient
    postprocess: PostprocessClient
    max_backlog_items: int


async def answer(
    inbound: Inbound, context: RequestContext, hops: Hops, recording: Recording
) -> AsyncGenerator[bytes, None]:
    """From a validated HTTP request to response bytes, SSE events or one JSON body. Raises RequestError.

    Nothing is yielded before the engine has produced something, so that an error up to there still gets its HTTP
    status.
    """
    # 1. tokenizer: chat template and tokenization, once; refuses what does not fit the model's context.
    sent_s = time.time()
    tokenizing = hops.tokenizer.tokenize(inbound.tokenize_request(context.sent_now(context.traceparent)))
    tokenized = await within(context.deadline_s, tokenizing)
    recording.hop_answered(tokenized.stages, sent_s)
    # 2. postprocess, which has the engine generate, detokenizes, matches stop strings and renders.
    sent_s = time.time()
    request = inbound.generate_request(context.sent_now(context.traceparent), tokenized)

    def generating(sink: Sink[bytes | Closing]) -> Awaitable[None]:
        return within(context.deadline_s + _LAST_REPORT_S, hops.postprocess.generate(request, sink))

    # 3. back through the gateway: what has come since the last write is the next one.
    async with aclosing(pulled(generating, hops.max_backlog_items)) as batches:
        async for batch in batches:
            closing = batch[-1] if isinstance(batch[-1], Closing) else None
            data = b"".join(item for item in batch if not isinstance(item, Closing))
            if closing is not None:
                if data and inbound.include_timings:  # which say when the first byte was written
                    yield data
                    data = b""
                recording.summarise(closing.summary, sent_s)
                data += _last_data(closing, inbound, context, recording)
            if data:
                yield data
            if closing is not None and closing.data:  # none ahead of an error
                recording.whole = True


def _last_data(closing: Closing, inbound: Inbound, context: RequestContext, recording: Recording) -> bytes:
    if closing.data and inbound.include_timings:
        return with_timings(closing.data, recording.timings(context.trace_id))
    return closing.data
