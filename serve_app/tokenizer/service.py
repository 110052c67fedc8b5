"""The tokenizer hop's work, in threads: a long text holds up neither the event loop nor a short text beside it.

Each item has a time limit and fails alone. Knows nothing of Ray.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from serve_app.errors import DeadlineExceeded
from serve_app.messages import Detokenized, RequestContext, TokenIds, Tokenized, TokenizeRequest
from serve_app.telemetry.hop import hop_span
from serve_app.telemetry.names import TOKENIZER, TOKENIZER_QUEUE
from serve_app.telemetry.stages import queue_stage
from serve_app.telemetry.tracing import Tracing
from serve_app.tokenizer.encoder import PromptEncoder

T = TypeVar("T", bound=Tokenized | Detokenized)

# Longer texts take more than about 50 ms (2 MB/s, measured on one core).
_LONG_CHARACTERS = 100_000


class TokenizerService:
    """`threads` items at once, `item_timeout_s` seconds for each from the moment it starts."""

    def __init__(self, encoder: PromptEncoder, threads: int, item_timeout_s: float, tracing: Tracing) -> None:
        self._encoder = encoder
        self._tracing = tracing
        self.in_flight = 0  # items, those that wait for a thread included
        self.queued = 0  # items that wait for a thread
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._free = asyncio.Semaphore(threads)
        # Of long texts one at a time: side by side they would hold every thread for seconds, and short ones would wait.
        self._long = asyncio.Semaphore(1)
        self._item_timeout_s = item_timeout_s

    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        """Renders and tokenizes. Raises RequestError."""
        lane = [self._long, self._free] if request.characters() > _LONG_CHARACTERS else [self._free]
        return await self._run(request.context, lane, lambda: self._encoder.encode(request))

    async def detokenize(self, context: RequestContext, ids: TokenIds) -> Detokenized:
        """The text of `ids`. Raises RequestError."""
        return await self._run(context, [self._free], lambda: self._encoder.decode(ids))

    async def _run(self, context: RequestContext, places: list[asyncio.Semaphore], work: Callable[[], T]) -> T:
        """The work's result, with the stages of its way through this hop."""
        self.in_flight += 1
        try:
            with hop_span(self._tracing, TOKENIZER, context) as span:
                begun_s, done = await self._finish(context, places, work)
                stages = (queue_stage(TOKENIZER_QUEUE, context, begun_s), *done.stages)
                span.stages(stages)
                return msgspec.structs.replace(done, stages=stages)
        finally:
            self.in_flight -= 1

    async def _finish(
        self, context: RequestContext, places: list[asyncio.Semaphore], work: Callable[[], T]
    ) -> tuple[float, T]:
        """When a thread began on the work, and its result."""

        def timed() -> tuple[float, T]:
            return time.time(), work()

        item: asyncio.Future[tuple[float, T]] = await self._start(context, places, timed)
        limit_s = min(self._item_timeout_s, context.remaining_s())
        try:
            return await asyncio.wait_for(asyncio.shield(item), limit_s)
        except TimeoutError:
            raise DeadlineExceeded(f"Tokenizing this request takes longer than its limit of {limit_s:.1f} s.") from None

    async def _start(
        self, context: RequestContext, places: list[asyncio.Semaphore], work: Callable[[], tuple[float, T]]
    ) -> asyncio.Future[tuple[float, T]]:
        """Begins the work once every place is free, or raises DeadlineExceeded without beginning it."""
        taken: list[asyncio.Semaphore] = []
        self.queued += 1
        try:
            async with asyncio.timeout(context.remaining_s()):
                for place in places:
                    await place.acquire()
                    taken.append(place)
            if context.remaining_s() <= 0:
                raise TimeoutError
            item = asyncio.get_running_loop().run_in_executor(self._pool, work)
        except BaseException as error:
            _release(taken)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("The request's deadline passed while it waited for the tokenizer.") from None
            raise
        finally:
            self.queued -= 1
        # A thread cannot be stopped: its places are given back when it has finished, not when its caller gave up.
        item.add_done_callback(lambda done: _give_back(taken, done))
        return item


def _release(places: list[asyncio.Semaphore]) -> None:
    for place in places:
        place.release()


def _give_back(places: list[asyncio.Semaphore], item: asyncio.Future[tuple[float, T]]) -> None:
    _release(places)
    if not item.cancelled():
        item.exception()  # marks it as seen, where its caller has left
