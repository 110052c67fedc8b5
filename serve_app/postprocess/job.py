"""One HTTP request while it is generated: its choices, its bytes, and what is measured of them.

No I/O: `service.py` brings the engine's deltas here and takes bytes away.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from serve_app.messages import Closing, EngineDelta, GenerateRequest, GenerateSummary, Stage
from serve_app.postprocess.choice import Update
from serve_app.postprocess.render import DONE, Echo, Renderer, Usage
from serve_app.postprocess.run import Run
from serve_app.telemetry.names import DETOKENIZE, POSTPROCESS_QUEUE, RENDER
from serve_app.telemetry.stages import Work, queue_stage
from serve_app.telemetry.tracing import HopSpan

# What a span may hold of a completion, in characters.
_MAX_CAPTURED = 32_768


# In place of the one token that the engine generates for `max_tokens: 0`.
_DISCARDED = Update("", (), "length")


class Job:
    """`keep_text` is for the span."""

    def __init__(
        self, request: GenerateRequest, runs: list[Run], renderer: Renderer, begun_s: float, keep_text: bool
    ) -> None:
        self.request = request
        self.runs = runs
        self.keep_text = keep_text
        self._detokenizing = Work(DETOKENIZE)
        self._rendering = Work(RENDER)
        self._renderer = renderer
        self._begun_s = begun_s
        self._whole_s: float | None = None  # when the last item of a whole answer was ready

    def take(self, run: Run, delta: EngineDelta) -> bytes:
        """What the engine has made of a choice; gives the SSE events that are due now, or nothing."""
        now_s = time.time()
        echo = run.arrived(delta, now_s)
        update = _DISCARDED if self.request.discard_output else run.choice.push(delta)
        run.finish_reason = update.finish_reason
        self._detokenizing.add(now_s, time.time())
        if not self.request.stream or self.keep_text:
            run.collect(update)
        if not self.request.stream:
            return b""
        due = run.due(update, len(delta.token_ids))
        if due is None or (run.sent_any and _says_nothing(due, echo)):
            return b""
        return self._chunk(run, due, echo)

    def held(self) -> Iterator[bytes]:
        """SSE events of what waits for further tokens that will not come."""
        if self.request.stream:
            for run in self.runs:
                if (update := run.held()) is not None and not _says_nothing(update, None):
                    yield self._chunk(run, update, None)

    def _chunk(self, run: Run, update: Update, echo: Echo | None) -> bytes:
        first, run.sent_any = not run.sent_any, True
        begin_s = time.time()
        chunk = self._renderer.chunk(run.choice.index, update, echo, first)
        self._rendering.add(begin_s, time.time())  # not `_timed`: a context per token costs as much as the rendering
        return chunk

    def last_events(self) -> bytes:
        """The event after the last choice, with the usage or to carry the timings; empty where neither is asked for."""
        if not self.request.include_usage and not self.request.include_timings:
            return b""
        with self._timed():
            return self._renderer.usage_chunk(self._usage() if self.request.include_usage else None)

    def body(self) -> bytes:
        """The whole JSON body."""
        with self._timed():
            return self._renderer.body([run.finished() for run in self.runs], self._usage())

    def last_item(self) -> Closing:
        """What ends a whole answer: its last events, or its body."""
        closing = self.closing(self.last_events() + DONE if self.request.stream else self.body())
        self._whole_s = time.time()
        return closing

    def closing(self, data: bytes = b"") -> Closing:
        """The last item of any answer, with what was measured until now."""
        now_s = time.time()
        usage = self._usage()
        summary = GenerateSummary(
            stages=(*self._own_stages(), *(one for run in self.runs for one in run.stages(now_s))),
            choices=tuple(run.metrics(now_s) for run in self.runs),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        )
        return Closing(data, summary)

    def describe(self, span: HopSpan) -> None:
        """Puts the hop's own stages on its span; the engine's replica makes the spans of its phases.

        A whole answer ends the span with its last item, whatever became of its reader afterwards.
        """
        if span.sampled:
            span.stages(self._own_stages())
            span.set(
                {
                    "gen_ai.response.finish_reasons": [run.finish_reason for run in self.runs if run.finish_reason],
                    "tokenline.choices": len(self.runs),
                    "tokenline.stop_string": any(run.choice.stopped for run in self.runs),
                }
            )
            if self.keep_text:
                texts = [run.text[:_MAX_CAPTURED] for run in self.runs]
                span.set({"gen_ai.output.messages": msgspec.json.encode(texts).decode()})
        if self._whole_s is not None:
            span.end(self._whole_s)

    def _own_stages(self) -> tuple[Stage, ...]:
        queue = queue_stage(POSTPROCESS_QUEUE, self.request.context, self._begun_s)
        return (queue, *self._detokenizing.stages(), *self._rendering.stages())

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(map(len, self.request.prompt_ids)),
            completion_tokens=sum(run.choice.generated for run in self.runs),
            cached_tokens=sum(run.cached_tokens for run in self.runs[:: self.request.n]),
        )

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin_s = time.time()
        yield
        self._rendering.add(begin_s, time.time())


def _says_nothing(update: Update, echo: Echo | None) -> bool:
    return not update.text and not update.scored and update.finish_reason is None and echo is None
