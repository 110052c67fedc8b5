"""The path's own promises: nothing waits past the deadline, and a closed answer closes what is behind it."""

import asyncio
import time
from collections.abc import AsyncGenerator

import msgspec
import pytest
from streams import pushing

from serve_app.config import GatewaySection
from serve_app.errors import DeadlineExceeded
from serve_app.gateway.inbound import Inbound, from_completion
from serve_app.gateway.recording import Recording
from serve_app.gateway.schema import CompletionBody
from serve_app.messages import (
    Detokenized,
    GenerateRequest,
    PathReport,
    RequestContext,
    TokenIds,
    Tokenized,
    TokenizeRequest,
)
from serve_app.path import Hops, answer


def recording() -> Recording:
    return Recording("id", "chat", "m", time.time())


class FakeTokenizer:
    def __init__(self, hangs: bool = False) -> None:
        self._hangs = hangs

    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        if self._hangs:
            await asyncio.Event().wait()
        return Tokenized(((1,),), (16,), 100, 50)

    async def detokenize(self, context: RequestContext, ids: TokenIds) -> Detokenized:
        raise NotImplementedError


class FakePostprocess:
    def __init__(self) -> None:
        self.closed = False

    @pushing
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            self.closed = True

    async def report(self) -> PathReport:
        raise NotImplementedError


def hops(postprocess: FakePostprocess) -> Hops:
    return Hops(FakeTokenizer(), postprocess, 100)


@pytest.fixture
def inbound() -> Inbound:
    return from_completion(msgspec.convert({"model": "m", "prompt": "hi"}, CompletionBody), GatewaySection())


async def test_a_tokenizer_that_never_answers_ends_at_the_deadline(inbound: Inbound) -> None:
    stream = answer(
        inbound,
        RequestContext("id", time.time() + 0.05),
        Hops(FakeTokenizer(hangs=True), FakePostprocess(), 100),
        recording(),
    )
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(anext(stream), 5)


async def test_an_engine_that_goes_silent_ends_at_the_deadline_and_is_closed(inbound: Inbound) -> None:
    postprocess = FakePostprocess()
    stream = answer(inbound, RequestContext("id", time.time() + 0.2), hops(postprocess), recording())
    assert await anext(stream) == b"first"
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(anext(stream), 5)
    assert postprocess.closed


async def test_closing_the_answer_closes_the_postprocessor_before_it_returns(inbound: Inbound) -> None:
    postprocess = FakePostprocess()
    stream = answer(inbound, RequestContext("id", time.time() + 60), hops(postprocess), recording())
    assert await anext(stream) == b"first"
    await stream.aclose()
    assert postprocess.closed
