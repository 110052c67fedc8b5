"""Postprocess: runs a request's choices on the engine and yields response bytes as soon as there are any.

Knows the engine only as something that takes an `EngineRequest` and streams `EngineDelta`s; knows nothing of HTTP or
Ray.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec

from serve_app.aio import merge, task_count
from serve_app.errors import EngineDied
from serve_app.messages import Closing, EngineDelta, EngineRequest, GenerateRequest, PathReport
from serve_app.postprocess.choice import Choice, Update
from serve_app.postprocess.job import Job
from serve_app.postprocess.render import Echo, renderer_for
from serve_app.postprocess.run import Run
from serve_app.telemetry.hop import hop_span
from serve_app.telemetry.names import POSTPROCESS
from serve_app.telemetry.tracing import HopSpan, Tracing
from serve_app.vocabulary import Vocabulary


def _nth_seed(seed: int, number: int) -> int:
    """The seed of a prompt's choice `number`, within the 64 signed bits that vLLM takes; the first has `seed`."""
    return (seed + number + (1 << 63)) % (1 << 64) - (1 << 63)


def _engine_request_ids(request_id: str, count: int) -> Sequence[str]:
    """The ids under which the choices of one request run in the engine."""
    return [request_id] if count == 1 else [f"{request_id}-{index}" for index in range(count)]


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


class PostprocessService:
    """The hop's work. One instance serves many requests at once; `in_flight` is how many now."""

    def __init__(
        self, vocabulary: Vocabulary, engine: EngineClient, tracing: Tracing, choice_type: type[Choice] = Choice
    ) -> None:
        self._vocabulary = vocabulary
        self._engine = engine
        self._tracing = tracing
        self._choice_type = choice_type
        self.in_flight = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[bytes | Closing, None]:
        """SSE events ending in `[DONE]`, or one JSON body if the request does not stream. Raises RequestError.

        The last item is a `Closing`, also ahead of an error.
        """
        begun_s = time.time()
        self.in_flight += 1
        try:
            with hop_span(self._tracing, POSTPROCESS, request.context) as span:
                runs, renderer = self._runs(request, span), renderer_for(request, self._vocabulary)
                job = Job(request, runs, renderer, begun_s, keep_text=self._tracing.capture_content and span.sampled)
                try:
                    async with aclosing(self._stream(job)) as items:
                        async for item in items:
                            yield item
                except Exception:
                    yield job.closing()
                    raise
                finally:
                    job.describe(span)
        finally:
            self.in_flight -= 1

    async def report(self) -> PathReport:
        """For the readiness probe."""
        return (await self._engine.report()).with_tasks("postprocess", task_count())

    def _runs(self, request: GenerateRequest, span: HopSpan) -> list[Run]:
        count = len(request.prompt_ids) * request.n
        context = request.context.sent_now(span.traceparent)
        runs = []
        for index, engine_id in enumerate(_engine_request_ids(context.request_id, count)):
            prompt, number = divmod(index, request.n)
            sampling = request.sampling
            if sampling.seed is not None and request.n > 1:
                # As vLLM does for n > 1: each choice of a prompt has a seed of its own, or all would be the same.
                sampling = msgspec.structs.replace(sampling, seed=_nth_seed(sampling.seed, number))
            ids = request.prompt_ids[prompt]
            engine_request = EngineRequest(context, engine_id, ids, request.max_tokens[prompt], sampling)
            choice = self._choice_type(index, self._vocabulary, ids, request.stop, sampling)
            runs.append(Run(choice, engine_request, self._echo_text(request, prompt)))
        return runs

    def _echo_text(self, request: GenerateRequest, prompt: int) -> str | None:
        if request.echo_texts is None:
            return None
        text = request.echo_texts[prompt]
        return self._vocabulary.decode(request.prompt_ids[prompt]) if text is None else text

    async def _updates(self, job: Job, run: Run) -> AsyncGenerator[tuple[Run, Update, Echo | None], None]:
        """One choice's updates. A stop string first closes the engine's stream, which aborts the request there."""
        async with aclosing(self._engine.generate(run.engine_request)) as deltas:
            async for delta in deltas:
                now_s = time.time()
                echo = run.arrived(delta, now_s)
                update = _DISCARDED if job.request.discard_output else run.choice.push(delta)
                run.finish_reason = update.finish_reason
                job.detokenizing.add(now_s, time.time())
                if update.finish_reason is None:
                    yield run, update, echo
                    continue
                if delta.finish_reason is None:
                    await deltas.aclose()
                yield run, update, echo
                await _read_out(deltas)
                return
        raise EngineDied("The engine ended the stream before the request was done.")

    async def _stream(self, job: Job) -> AsyncGenerator[bytes | Closing, None]:
        async with aclosing(merge([self._updates(job, run) for run in job.runs])) as updates:
            async for run, update, echo in updates:
                if not job.request.stream or job.keep_text:
                    run.collect(update)
                if job.request.stream and not (run.sent_any and _says_nothing(update, echo)):
                    yield job.chunk(run, update, echo)
        yield job.last_item()


def _says_nothing(update: Update, echo: Echo | None) -> bool:
    return not update.text and not update.scored and update.finish_reason is None and echo is None
