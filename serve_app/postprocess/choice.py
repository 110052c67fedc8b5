"""One choice of a request, from the engine's deltas to text: detokenizer, stop strings and log-probabilities together.

Pure: deltas in, updates out. Knows nothing of HTTP formats (`render.py`) and of where deltas come from (`service.py`).
"""

from collections import deque
from dataclasses import dataclass

from serve_app.messages import EngineDelta, FinishReason, Sampling, TokenIds, TokenLogprob
from serve_app.postprocess.detokenizer import Detokenizer
from serve_app.postprocess.stop import StopMatcher
from serve_app.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of the returned text, its log-probability, and where it begins in the text (in characters)."""

    logprob: TokenLogprob
    offset: int


@dataclass(frozen=True, slots=True)
class Update:
    """What may be sent now. With `finish_reason` set it is the choice's last."""

    text: str
    scored: tuple[ScoredToken, ...] = ()
    finish_reason: FinishReason | None = None

    def with_next(self, update: "Update") -> "Update":
        """This and the one after it as one."""
        return Update(self.text + update.text, self.scored + update.scored, update.finish_reason)


class Choice:
    """State of one choice; `index` is its number in the response, `generated` the tokens the engine made for it."""

    def __init__(
        self, index: int, vocabulary: Vocabulary, prompt_ids: TokenIds, stop: tuple[str, ...], sampling: Sampling
    ) -> None:
        self.index = index
        self.generated = 0
        self._min_tokens = sampling.min_tokens
        self._detokenizer = Detokenizer(vocabulary, prompt_ids)
        self._matcher = StopMatcher(stop)
        self._made = 0  # characters detokenized
        self._sent = 0  # characters given out
        self._waiting: deque[tuple[int, int, TokenLogprob]] = deque()  # (begin, end, logprob) of tokens not given out

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended it."""
        return self._matcher.stopped

    def push(self, delta: EngineDelta) -> Update:
        """Takes the engine's next tokens. After an update with a finish reason nothing more may be pushed."""
        pieces = []
        for position, token_id in enumerate(delta.token_ids):
            self.generated += 1
            if delta.ends_with_stop_token and position == len(delta.token_ids) - 1:
                break
            text = self._detokenizer.push(token_id)
            if delta.logprobs is not None:
                # Part of a character belongs to that character, whether it comes out or is cut.
                end = self._made + len(text) + self._detokenizer.incomplete
                self._waiting.append((self._made, end, delta.logprobs[position]))
            self._made += len(text)
            pieces.append(self._matcher.push(text, armed=self.generated > self._min_tokens))
            if self._matcher.stopped:
                break
        finish_reason: FinishReason | None = "stop" if self._matcher.stopped else delta.finish_reason
        if finish_reason is not None and not self._matcher.stopped:
            pieces.append(self._matcher.flush())
        ready = "".join(pieces)
        self._sent += len(ready)
        return Update(ready, self._take_scored(final=finish_reason is not None), finish_reason)

    def _take_scored(self, final: bool) -> tuple[ScoredToken, ...]:
        """Tokens whose text has gone out whole; at the end also the rest, but none past a stop string's cut."""
        taken = []
        while self._waiting:
            begin, end, logprob = self._waiting[0]
            if end > self._sent and not (final and (begin < self._sent or not self._matcher.stopped)):
                break
            taken.append(ScoredToken(logprob, begin))
            self._waiting.popleft()
        return tuple(taken)
