"""The whole path of a request, in order.

    HTTP ─▶ gateway ─▶ tokenizer ─▶ gateway ─▶ postprocess ─▶ engine
    HTTP ◀─ gateway ◀──── ready bytes ──── postprocess ◀─ token ids ─ engine

The gateway calls `answer`; what stands behind the two clients is Ray Serve handles in a cluster
(`deployments/handles.py`) and plain objects in tests. The third hop is `PostprocessService.generate`, which runs each
choice on the engine.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from serve_app.aio import until, within
from serve_app.gateway.inbound import Inbound
from serve_app.messages import GenerateRequest, PathReport, RequestContext, TokenIds, Tokenized, TokenizeRequest


class TokenizerClient(Protocol):
    """The tokenizer hop as the gateway sees it. Raises RequestError."""

    async def tokenize(self, request: TokenizeRequest) -> Tokenized: ...

    async def detokenize(self, context: RequestContext, ids: TokenIds) -> str: ...


class PostprocessClient(Protocol):
    """The postprocess hop as the gateway sees it. Closing the stream cancels the request in every hop behind it."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[bytes, None]: ...

    async def report(self) -> PathReport: ...


@dataclass(frozen=True)
class Hops:
    """What the gateway calls."""

    tokenizer: TokenizerClient
    postprocess: PostprocessClient


async def answer(inbound: Inbound, context: RequestContext, hops: Hops) -> AsyncGenerator[bytes, None]:
    """From a validated HTTP request to response bytes, SSE events or one JSON body. Raises RequestError.

    Nothing is yielded before the engine has produced something, so that an error up to there still gets its HTTP
    status.
    """
    # 1. tokenizer: chat template and tokenization, once; refuses what does not fit the model's context.
    tokenizing = hops.tokenizer.tokenize(inbound.tokenize_request(context))
    tokenized = await within(context.deadline_s, tokenizing)
    # 2. postprocess, which streams from the engine, detokenizes, matches stop strings and renders.
    stream = hops.postprocess.generate(inbound.generate_request(context, tokenized))
    # 3. back through the gateway, never past the deadline.
    async with aclosing(until(context.deadline_s, stream)) as chunks:
        async for chunk in chunks:
            yield chunk
