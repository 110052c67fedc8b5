"""The whole path of a request, in order.

    HTTP ─▶ gateway ─▶ tokenizer ─▶ gateway ─▶ postprocess ─▶ engine
    HTTP ◀─ gateway ◀──── ready bytes ──── postprocess ◀─ token ids ─ engine

The gateway calls `answer`; what stands behind the two clients is Ray Serve handles in a cluster
(`deployments/handles.py`) and plain objects in tests. The third hop is `PostprocessService.generate`, which runs each
choice on the engine.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from serve_app.aio import until, within
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
    """The postprocess hop as the gateway sees it. Closing the stream cancels the request in every hop behind it."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[bytes | Closing, None]: ...

    async def report(self) -> PathReport: ...


@dataclass(frozen=True)
class Hops:
    """What the gateway calls."""

    tokenizer: TokenizerClient
    postprocess: PostprocessClient


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
    # 2. postprocess, which streams from the engine, detokenizes, matches stop strings and renders.
    sent_s = time.time()
    stream = hops.postprocess.generate(inbound.generate_request(context.sent_now(context.traceparent), tokenized))
    # 3. back through the gateway, never past the deadline.
    async with aclosing(until(context.deadline_s + _LAST_REPORT_S, stream)) as items:
        async for item in items:
            if not isinstance(item, Closing):
                yield item
                continue
            recording.summarise(item.summary, sent_s)
            if item.data:  # none ahead of an error
                yield (
                    with_timings(item.data, recording.timings(context.trace_id))
                    if inbound.include_timings
                    else item.data
                )
                recording.whole = True
