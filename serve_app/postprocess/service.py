"""Postprocess: runs a request's choices on the engine and yields response bytes as soon as there are any.

Knows the engine only as something that takes an `EngineRequest` and streams `EngineDelta`s; knows nothing of HTTP or
Ray.
"""

import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import msgspec

from serve_app.aio import merge, task_count
from serve_app.errors import EngineDied
from serve_app.messages import EngineDelta, EngineRequest, GenerateRequest, PathReport, engine_request_ids
from serve_app.postprocess.choice import Choice, ScoredToken, Update
from serve_app.postprocess.render import DONE, Echo, FinishedChoice, Renderer, Usage, renderer_for
from serve_app.vocabulary import Vocabulary


def _nth_seed(seed: int, number: int) -> int:
    """The seed of a prompt's choice `number`, within the 64 signed bits that vLLM takes; the first has `seed`."""
    return (seed + number + (1 << 63)) % (1 << 64) - (1 << 63)


# In place of the one token that the engine generates for `max_tokens: 0`.
_DISCARDED = Update("", (), "length")


async def _read_out(deltas: AsyncGenerator[EngineDelta, None]) -> None:
    """Lets a finished stream end by itself, so that it counts as completed and not as cancelled."""
    with contextlib.suppress(Exception):  # the answer is whole: what goes wrong after it is not its client's
        async for _ in deltas:
            pass


class EngineClient(Protocol):
    """The engine as the postprocessor sees it."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """Streams deltas; closing the stream aborts the request in the engine."""

    async def report(self) -> PathReport:
        """The load of one engine replica, with its tasks."""


class _Run:
    """A choice while it runs, with the engine request that feeds it."""

    def __init__(self, choice: Choice, engine_request: EngineRequest, echo_text: str | None) -> None:
        self.choice = choice
        self.engine_request = engine_request
        self.echo_text = echo_text
        self.cached_tokens = 0
        self.text: list[str] = []
        self.scored: list[ScoredToken] = []
        self.sent_any = False

    def echo(self, delta: EngineDelta) -> Echo | None:
        """What stands ahead of the completion, known with the first delta."""
        if self.echo_text is None:
            return None
        ids = self.engine_request.prompt_ids
        return Echo(self.echo_text, tuple(zip(ids, delta.prompt_logprobs or (), strict=False)))


class PostprocessService:
    """The hop's work. One instance serves many requests at once."""

    def __init__(self, vocabulary: Vocabulary, engine: EngineClient) -> None:
        self._vocabulary = vocabulary
        self._engine = engine

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[bytes, None]:
        """SSE events ending in `[DONE]`, or one JSON body if the request does not stream. Raises RequestError."""
        runs = self._runs(request)
        renderer = renderer_for(request, self._vocabulary)
        chunks = self._chunks(request, runs, renderer) if request.stream else self._body(request, runs, renderer)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def report(self) -> PathReport:
        """For the readiness probe."""
        return (await self._engine.report()).with_tasks("postprocess", task_count())

    def _runs(self, request: GenerateRequest) -> list[_Run]:
        count = len(request.prompt_ids) * request.n
        runs = []
        for index, engine_id in enumerate(engine_request_ids(request.context.request_id, count)):
            prompt, number = divmod(index, request.n)
            sampling = request.sampling
            if sampling.seed is not None and request.n > 1:
                # As vLLM does for n > 1: each choice of a prompt has a seed of its own, or all would be the same.
                sampling = msgspec.structs.replace(sampling, seed=_nth_seed(sampling.seed, number))
            ids = request.prompt_ids[prompt]
            engine_request = EngineRequest(request.context, engine_id, ids, request.max_tokens[prompt], sampling)
            choice = Choice(index, self._vocabulary, ids, request.stop, sampling)
            runs.append(_Run(choice, engine_request, self._echo_text(request, prompt)))
        return runs

    def _echo_text(self, request: GenerateRequest, prompt: int) -> str | None:
        if request.echo_texts is None:
            return None
        text = request.echo_texts[prompt]
        return self._vocabulary.decode(request.prompt_ids[prompt]) if text is None else text

    async def _updates(
        self, request: GenerateRequest, run: _Run
    ) -> AsyncGenerator[tuple[_Run, Update, Echo | None], None]:
        """One choice's updates. A stop string first closes the engine's stream, which aborts the request there."""
        first = True
        async with aclosing(self._engine.generate(run.engine_request)) as deltas:
            async for delta in deltas:
                run.cached_tokens = max(run.cached_tokens, delta.cached_tokens)
                echo = run.echo(delta) if first else None
                first = False
                update = _DISCARDED if request.discard_output else run.choice.push(delta)
                if update.finish_reason is None:
                    yield run, update, echo
                    continue
                if delta.finish_reason is None:
                    await deltas.aclose()
                yield run, update, echo
                await _read_out(deltas)
                return
        raise EngineDied("The engine ended the stream before the request was done.")

    async def _chunks(
        self, request: GenerateRequest, runs: list[_Run], renderer: Renderer
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(merge([self._updates(request, run) for run in runs])) as updates:
            async for run, update, echo in updates:
                nothing_new = not update.text and not update.scored and update.finish_reason is None and echo is None
                if nothing_new and run.sent_any:
                    continue
                first, run.sent_any = not run.sent_any, True
                yield renderer.chunk(run.choice.index, update, echo, first)
        closing = renderer.usage_chunk(self._usage(request, runs)) if request.include_usage else b""
        yield closing + DONE

    async def _body(
        self, request: GenerateRequest, runs: list[_Run], renderer: Renderer
    ) -> AsyncGenerator[bytes, None]:
        finished: dict[int, FinishedChoice] = {}
        echoes: dict[int, Echo] = {}
        async with aclosing(merge([self._updates(request, run) for run in runs])) as updates:
            async for run, update, echo in updates:
                index = run.choice.index
                if echo is not None:
                    echoes[index] = echo
                run.text.append(update.text)
                run.scored.extend(update.scored)
                if update.finish_reason is not None:
                    text = "".join(run.text)
                    finished[index] = FinishedChoice(
                        index, text, tuple(run.scored), update.finish_reason, echoes.get(index)
                    )
        yield renderer.body([finished[run.choice.index] for run in runs], self._usage(request, runs))

    @staticmethod
    def _usage(request: GenerateRequest, runs: list[_Run]) -> Usage:
        return Usage(
            prompt_tokens=sum(map(len, request.prompt_ids)),
            completion_tokens=sum(run.choice.generated for run in runs),
            cached_tokens=sum(run.cached_tokens for run in runs[:: request.n]),
        )
