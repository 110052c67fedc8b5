"""The simulated engine: same contract as the real one, no model. For rates and faults; its tokens mean nothing.

One loop steps all running sequences, as a real engine does: a step lasts longer with more sequences, prompts are
prefilled one after the other, and sequences wait for a slot and for KV blocks. Deterministic: the ids depend on the
prompt alone.
"""

import asyncio
import contextlib
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from serve_app.config import DelaysSection, SimSection
from serve_app.errors import EngineDied, InvalidRequest
from serve_app.messages import EngineDelta, EngineRequest, EngineTimes, LoadReport, TokenLogprob


@dataclass(eq=False)
class _Sequence:
    request: EngineRequest
    blocks: int
    hash: int
    queued_s: float = field(default_factory=time.time)
    scheduled_s: float | None = None
    first_token_s: float | None = None
    generated: int = 0
    ready: asyncio.Queue[EngineDelta | Exception] = field(default_factory=asyncio.Queue)


class SimEngine:
    """See `Engine`. `vocabulary_size` bounds the ids it makes up, which begin at `first_id` (past the special ones)."""

    def __init__(
        self, config: SimSection, vocabulary_size: int, first_id: int = 32, delays: DelaysSection | None = None
    ) -> None:
        self._config = config
        self._delays = delays or DelaysSection()
        self._ids = range(first_id, vocabulary_size)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._free_blocks = config.kv_blocks
        self._made = 0
        self._dead = False
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """See `Engine.start`."""
        self._loop = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._die()
        if self._loop is not None:
            self._loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop
            self._loop = None

    async def load(self) -> LoadReport:
        """See `Engine.load`."""
        if self._dead:
            raise EngineDied("The engine is dead.")
        used = self._config.kv_blocks - self._free_blocks
        return LoadReport(len(self._running), len(self._waiting), used / self._config.kv_blocks, self._config.kv_blocks)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """See `Engine.generate`."""
        if self._dead:
            raise EngineDied("The engine is dead.")
        blocks = -(-(len(request.prompt_ids) + request.max_tokens) // self._config.block_tokens)
        if blocks > self._config.kv_blocks:
            raise InvalidRequest(
                f"The request needs {blocks} KV blocks and the engine has {self._config.kv_blocks}.", "max_tokens"
            )
        sequence = _Sequence(request, blocks, zlib.crc32(repr((request.prompt_ids, request.sampling.seed)).encode()))
        if self._delays.engine_queue_ms:
            await asyncio.sleep(self._delays.engine_queue_ms / 1000)
        self._waiting.append(sequence)
        self._wake.set()
        try:
            while True:
                delta = await sequence.ready.get()
                if isinstance(delta, Exception):
                    raise delta
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._remove(sequence)

    def _remove(self, sequence: _Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
            self._free_blocks += sequence.blocks
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    async def _run(self) -> None:
        while not self._dead:
            await self._admit()
            if not self._running:
                self._wake.clear()
                if not self._waiting:
                    await self._wake.wait()
                continue
            sequences = tuple(self._running)
            await asyncio.sleep((self._config.step_ms + len(sequences) * self._config.step_ms_per_sequence) / 1000)
            for sequence in sequences:
                self._step(sequence)

    async def _admit(self) -> None:
        """Prefills waiting sequences, first come first served, while there are a slot and blocks for them."""
        while (
            self._waiting
            and len(self._running) < self._config.max_sequences
            and self._waiting[0].blocks <= self._free_blocks
        ):
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            self._free_blocks -= sequence.blocks
            sequence.scheduled_s = time.time()
            prefill_s = len(sequence.request.prompt_ids) / self._config.prefill_tokens_per_s
            await asyncio.sleep(prefill_s + self._delays.prefill_ms / 1000)

    def _step(self, sequence: _Sequence) -> None:
        config, request, made = self._config, sequence.request, sequence.generated
        if self._dead or sequence not in self._running or made == config.stall_after_tokens:
            return
        if made == config.fail_after_tokens:
            sequence.ready.put_nowait(RuntimeError("A fault was asked for."))
            self._remove(sequence)
            return
        if self._made == config.die_after_tokens:
            self._die()
            return
        now = time.time()
        sequence.first_token_s = sequence.first_token_s or now
        sequence.generated = made + 1
        self._made += 1
        last = sequence.generated >= request.max_tokens
        token_id = self._token(sequence, made)
        wanted = request.sampling.logprobs
        ends = token_id in request.sampling.stop_token_ids and sequence.generated > request.sampling.min_tokens
        sequence.ready.put_nowait(
            EngineDelta(
                token_ids=(token_id,),
                finish_reason="stop" if ends else "length" if last else None,
                ends_with_stop_token=ends,
                logprobs=None if wanted is None else (_logprob(token_id, wanted, self._ids.stop),),
                prompt_logprobs=self._prompt_logprobs(request) if made == 0 else None,
                times=EngineTimes(sequence.queued_s, sequence.scheduled_s, sequence.first_token_s, now)
                if ends or last or made == 0
                else None,
            )
        )
        if ends or last:
            self._remove(sequence)

    def _token(self, sequence: _Sequence, position: int) -> int:
        request = sequence.request
        if self._config.source == "echo":
            return request.prompt_ids[position % len(request.prompt_ids)]
        return self._ids[zlib.crc32(b"%d" % position, sequence.hash) % len(self._ids)]

    def _prompt_logprobs(self, request: EngineRequest) -> tuple[TokenLogprob | None, ...] | None:
        count = request.sampling.prompt_logprobs
        return (
            None
            if count is None
            else (None, *(_logprob(token_id, count, self._ids.stop) for token_id in request.prompt_ids[1:]))
        )

    def _die(self) -> None:
        self._dead = True
        for sequence in (*self._running, *self._waiting):
            sequence.ready.put_nowait(EngineDied("The engine died while it worked on this request."))


def _logprob(token_id: int, count: int, vocabulary_size: int) -> TokenLogprob:
    """Made up: the token itself is the likeliest, those behind it in the vocabulary follow."""
    top = tuple(((token_id + rank) % vocabulary_size, -0.5 - rank) for rank in range(count))
    return TokenLogprob(token_id, -0.5, top)
