"""A choice while it runs: its text so far, the engine request that feeds it, and what is measured of both."""

from serve_app.messages import ChoiceMetrics, EngineDelta, EngineRequest, EngineTimes, FinishReason, Stage
from serve_app.postprocess.choice import Choice, ScoredToken, Update
from serve_app.postprocess.render import Echo, FinishedChoice
from serve_app.telemetry.names import DECODE
from serve_app.telemetry.stages import aligned, engine_stages, times_with


class Run:
    """`echo_text` is what stands ahead of the completion, None where nothing does. `coalesce_tokens` is how many tokens
    are sent together."""

    def __init__(
        self, choice: Choice, engine_request: EngineRequest, echo_text: str | None, coalesce_tokens: int = 1
    ) -> None:
        self.choice = choice
        self.engine_request = engine_request
        self.cached_tokens = 0
        self.sent_any = False
        self.finish_reason: FinishReason | None = None
        self._coalesce_tokens = coalesce_tokens
        self._spoke = False
        self._held: Update | None = None
        self._held_tokens = 0
        self._echo_text = echo_text
        self._echo: Echo | None = None
        self._text: list[str] = []
        self._scored: list[ScoredToken] = []
        self._times: EngineTimes | None = None
        self._deltas = 0
        self._last_delta_s: float | None = None
        self._longest_gap_s: float | None = None

    def arrived(self, delta: EngineDelta, now_s: float) -> Echo | None:
        """Takes note of a delta; with the first one comes what stands ahead of the completion."""
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self._times = times_with(delta, self._times)
        if self._last_delta_s is not None:
            self._longest_gap_s = max(self._longest_gap_s or 0.0, now_s - self._last_delta_s)
        self._last_delta_s = now_s
        self._deltas += 1
        if self._deltas > 1 or self._echo_text is None:
            return None
        tokens = tuple(zip(self.engine_request.prompt_ids, delta.prompt_logprobs or (), strict=False))
        self._echo = Echo(self._echo_text, tokens)
        return self._echo

    def due(self, update: Update, tokens: int) -> Update | None:
        """What is to be sent now that `update` has come, made of so many tokens; None where it waits for more.

        The first text never waits, nor does the last.
        """
        if self._coalesce_tokens == 1 or not self._spoke:
            self._spoke = bool(update.text)
            return update
        self._held = update if self._held is None else self._held.with_next(update)
        self._held_tokens += tokens
        if self._held_tokens < self._coalesce_tokens and update.finish_reason is None:
            return None
        return self.held()

    def held(self) -> Update | None:
        """What waits, which it does no longer."""
        update, self._held, self._held_tokens = self._held, None, 0
        return update

    def collect(self, update: Update) -> None:
        """Keeps an update's text: for a response that is not streamed, or for the span."""
        self._text.append(update.text)
        self._scored.extend(update.scored)

    @property
    def text(self) -> str:
        """What was collected."""
        return "".join(self._text)

    def finished(self) -> FinishedChoice:
        """The whole choice, once it has a finish reason."""
        assert self.finish_reason is not None
        return FinishedChoice(self.choice.index, self.text, tuple(self._scored), self.finish_reason, self._echo)

    def stages(self, now_s: float) -> tuple[Stage, ...]:
        """The engine's phases of this choice, on this machine's clock. Unless it has finished, the last goes on."""
        return self._phases(now_s if self.finish_reason is None else self._last_delta_s or now_s, now_s)

    def metrics(self, now_s: float) -> ChoiceMetrics:
        """What was measured of its tokens; times are the engine's, on this machine's clock."""
        phases = self._phases(self._last_delta_s or now_s, now_s)
        decode = next((one for one in phases if one.name == DECODE), None)
        return ChoiceMetrics(
            tokens=self.choice.generated,
            first_token_s=None if decode is None else decode.begin_s,
            last_token_s=None if decode is None else decode.end_s,
            longest_gap_s=self._longest_gap_s,
            finish_reason=self.finish_reason,
            stop_string=self.choice.stopped,
        )

    def _phases(self, ended_s: float, now_s: float) -> tuple[Stage, ...]:
        context = self.engine_request.context
        stages = engine_stages(context, self._times, ended_s)
        return stages if context.sent_s is None else aligned(stages, context.sent_s, now_s)
