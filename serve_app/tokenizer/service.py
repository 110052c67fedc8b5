"""The tokenizer hop's work, in threads: a long text holds up neither the event loop nor a short text beside it.

Each item has a time limit and fails alone. Knows nothing of Ray.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from serve_app.errors import DeadlineExceeded
from serve_app.messages import RequestContext, TokenIds, Tokenized, TokenizeRequest
from serve_app.tokenizer.encoder import PromptEncoder

T = TypeVar("T")


class TokenizerService:
    """`threads` items at once, `item_timeout_s` seconds for each from the moment it starts."""

    def __init__(self, encoder: PromptEncoder, threads: int, item_timeout_s: float) -> None:
        self._encoder = encoder
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._free = asyncio.Semaphore(threads)
        self._item_timeout_s = item_timeout_s

    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        """Renders and tokenizes. Raises RequestError."""
        return await self._run(request.context, lambda: self._encoder.encode(request))

    async def detokenize(self, context: RequestContext, ids: TokenIds) -> str:
        """The text of `ids`. Raises RequestError."""
        return await self._run(context, lambda: self._encoder.decode(ids))

    async def _run(self, context: RequestContext, work: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(context.remaining_s()):
                await self._free.acquire()
        except TimeoutError:
            raise DeadlineExceeded("The request's deadline passed while it waited for the tokenizer.") from None
        item = asyncio.get_running_loop().run_in_executor(self._pool, work)
        # A thread cannot be stopped: its place is given back when it has really finished, not when its caller gave up.
        item.add_done_callback(self._give_back)
        limit_s = min(self._item_timeout_s, context.remaining_s())
        try:
            return await asyncio.wait_for(asyncio.shield(item), limit_s)
        except TimeoutError:
            raise DeadlineExceeded(f"Tokenizing this request takes longer than its limit of {limit_s:.1f} s.") from None

    def _give_back(self, item: asyncio.Future[T]) -> None:
        self._free.release()
        if not item.cancelled():
            item.exception()  # marks it as seen, where its caller has left
