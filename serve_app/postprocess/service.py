"""Postprocess: runs a request's choices on the engine and gives out response bytes as soon as there are any.

Knows the engine only as something that takes an `EngineRequest` and gives `EngineDelta`s to a sink; knows nothing of
HTTP or Ray. From a delta to its bytes nothing waits.
"""

import contextlib
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from serve_app.aio import Enough, Sink, task_count, together
from serve_app.errors import EngineDied
from serve_app.messages import Closing, EngineDelta, EngineRequest, GenerateRequest, PathReport
from serve_app.postprocess.choice import Choice
from serve_app.postprocess.job import Job
from serve_app.postprocess.render import renderer_for
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


class EngineClient(Protocol):
    """The engine as the postprocessor sees it."""

    async def generate(self, request: EngineRequest, sink: Sink[EngineDelta]) -> None:
        """Gives `sink` the deltas and returns after the last. Cancelling it, or raising Enough in the sink, aborts the
        request in the engine."""

    async def report(self) -> PathReport:
        """The load of one engine replica, with its tasks."""


class PostprocessService:
    """The hop's work. One instance serves many requests at once; `in_flight` is how many now."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        engine: EngineClient,
        tracing: Tracing,
        *,
        coalesce_tokens: int = 1,
        choice_type: type[Choice] = Choice,
    ) -> None:
        self._vocabulary = vocabulary
        self._engine = engine
        self._tracing = tracing
        self._coalesce_tokens = coalesce_tokens
        self._choice_type = choice_type
        self.in_flight = 0

    async def generate(self, request: GenerateRequest, sink: Sink[bytes | Closing]) -> None:
        """Gives `sink` SSE events ending in `[DONE]`, or one JSON body if the request does not stream. Raises
        RequestError.

        The last item is a `Closing`, also ahead of an error.
        """
        begun_s = time.time()
        self.in_flight += 1
        try:
            with hop_span(self._tracing, POSTPROCESS, request.context) as span:
                runs, renderer = self._runs(request, span), renderer_for(request, self._vocabulary)
                job = Job(request, runs, renderer, begun_s, keep_text=self._tracing.capture_content and span.sampled)
                try:
                    await together([self._run(job, run, sink) for run in runs])
                    sink(job.last_item())
                except Exception:
                    with contextlib.suppress(Exception):  # where the sink has failed, it fails again
                        for data in job.held():
                            sink(data)
                        sink(job.closing())
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
            runs.append(Run(choice, engine_request, self._echo_text(request, prompt), self._coalesce_tokens))
        return runs

    def _echo_text(self, request: GenerateRequest, prompt: int) -> str | None:
        if request.echo_texts is None:
            return None
        text = request.echo_texts[prompt]
        return self._vocabulary.decode(request.prompt_ids[prompt]) if text is None else text

    async def _run(self, job: Job, run: Run, sink: Sink[bytes | Closing]) -> None:
        """One choice. A stop string ends it before the engine does, which aborts the request there."""
        whole = False  # and taken by the sink

        def take(delta: EngineDelta) -> None:
            nonlocal whole
            if data := job.take(run, delta):
                sink(data)
            whole = run.finish_reason is not None
            if whole and delta.finish_reason is None:
                raise Enough

        try:
            await self._engine.generate(run.engine_request, take)
        except Exception:
            if not whole:  # what goes wrong after that is not its client's
                raise
        if not whole:
            raise EngineDied("The engine ended the stream before the request was done.")
