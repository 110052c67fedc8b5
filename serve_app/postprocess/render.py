"""Updates of choices to bytes in OpenAI's formats: SSE chunks and whole JSON bodies, for chat and for completions.

Pure. Log-probabilities get their token text and bytes here. Knows nothing of how updates come about (`choice.py`).
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from serve_app.messages import FinishReason, GenerateRequest, RequestKind, TokenLogprob
from serve_app.postprocess.choice import ScoredToken, Update
from serve_app.vocabulary import Vocabulary

DONE = b"data: [DONE]\n\n"

# JSON has no infinity; OpenAI's API gives this for a token of (almost) no probability.
_LEAST_LOGPROB = -9999.0

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request: each prompt once, what every choice generated, and what the prefix cache gave."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def fields(self) -> dict[str, Any]:
        """As OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt ahead of a completion; its tokens where their log-probabilities were asked for."""

    text: str
    tokens: tuple[tuple[int, TokenLogprob | None], ...] = ()


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """A whole choice, for a response that is not streamed."""

    index: int
    text: str
    scored: tuple[ScoredToken, ...]
    finish_reason: FinishReason
    echo: Echo | None


class Renderer(Protocol):
    """One of OpenAI's two formats."""

    def chunk(self, index: int, update: Update, echo: Echo | None, first: bool) -> bytes:
        """One SSE event; `first` for the first of its choice, which alone has an echo."""

    def usage_chunk(self, usage: Usage | None) -> bytes:
        """The SSE event that carries the usage, where one is given, and no choice."""

    def body(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The whole JSON response."""


def renderer_for(request: GenerateRequest, vocabulary: Vocabulary) -> Renderer:
    """The renderer of the request's kind."""
    if request.kind is RequestKind.CHAT:
        return _ChatRenderer(request, vocabulary)
    return _CompletionRenderer(request, vocabulary)


class _Envelope:
    """The fields around the choices, the same for both kinds."""

    id_prefix = ""
    object_name = ""
    chunk_object_name = ""

    def __init__(self, request: GenerateRequest, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._with_logprobs = request.sampling.logprobs is not None
        common = {
            "id": f"{self.id_prefix}-{request.context.request_id}",
            "created": request.created_s,
            "model": request.model,
        }
        self._body_fields = common | {"object": self.object_name}
        self._chunk_fields = common | {"object": self.chunk_object_name}
        self._null_usage = {"usage": None} if request.include_usage else {}

    def _event(self, choice: dict[str, Any]) -> bytes:
        return b"data: " + _encode(self._chunk_fields | {"choices": [choice]} | self._null_usage) + b"\n\n"

    def usage_chunk(self, usage: Usage | None) -> bytes:
        fields = {} if usage is None else {"usage": usage.fields()}
        return b"data: " + _encode(self._chunk_fields | {"choices": []} | fields) + b"\n\n"

    def _whole(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return _encode(self._body_fields | {"choices": choices, "usage": usage.fields()})


class _ChatRenderer(_Envelope):
    id_prefix, object_name, chunk_object_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def chunk(self, index: int, update: Update, echo: Echo | None, first: bool) -> bytes:
        del echo  # chat has none
        opening = b""
        if first:
            opening = self._event(self._choice(index, {"role": "assistant", "content": ""}, None, None))
            if not update.text and not update.scored and update.finish_reason is None:
                return opening
        delta = {"content": update.text} if update.text or update.scored else {}
        return opening + self._event(self._choice(index, delta, self._logprobs(update.scored), update.finish_reason))

    @staticmethod
    def _choice(index: int, delta: dict[str, str], logprobs: Any, finish_reason: FinishReason | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def body(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        return self._whole(
            [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": {"content": self._entries(choice.scored), "refusal": None}
                    if self._with_logprobs
                    else None,
                    "finish_reason": choice.finish_reason,
                }
                for choice in choices
            ],
            usage,
        )

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any] | None:
        return {"content": self._entries(scored), "refusal": None} if self._with_logprobs and scored else None

    def _entries(self, scored: Sequence[ScoredToken]) -> list[dict[str, Any]]:
        return [
            self._entry(token.logprob.token_id, token.logprob.logprob)
            | {"top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in token.logprob.top]}
            for token in scored
        ]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._vocabulary.token_text(token_id), self._vocabulary.raw_bytes(token_id)
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(raw)}


class _CompletionRenderer(_Envelope):
    id_prefix, object_name, chunk_object_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: GenerateRequest, vocabulary: Vocabulary) -> None:
        super().__init__(request, vocabulary)
        self._echo_length: dict[int, int] = {}  # per choice, in characters: `text_offset` counts the echo too

    def chunk(self, index: int, update: Update, echo: Echo | None, first: bool) -> bytes:
        del first  # an echo comes with the first chunk only
        return self._event(self._choice(index, update.text, update.scored, update.finish_reason, echo))

    def body(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        return self._whole(
            [self._choice(one.index, one.text, one.scored, one.finish_reason, one.echo) for one in choices], usage
        )

    def _choice(
        self,
        index: int,
        text: str,
        scored: Sequence[ScoredToken],
        finish_reason: FinishReason | None,
        echo: Echo | None,
    ) -> dict[str, Any]:
        if echo is not None:
            self._echo_length[index] = len(echo.text)
            text = echo.text + text
        logprobs = self._logprobs(scored, echo, self._echo_length.get(index, 0)) if self._with_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, scored: Sequence[ScoredToken], echo: Echo | None, shift: int) -> dict[str, Any]:
        rows: list[tuple[int, TokenLogprob | None, int]] = []
        if echo is not None:
            offsets = self._echo_offsets(echo)
            rows += [(*token, offset) for token, offset in zip(echo.tokens, offsets, strict=True)]
        rows += [(token.logprob.token_id, token.logprob, shift + token.offset) for token in scored]
        return {
            "tokens": [self._vocabulary.token_text(token_id) for token_id, _, _ in rows],
            "token_logprobs": [
                None if logprob is None else max(logprob.logprob, _LEAST_LOGPROB) for _, logprob, _ in rows
            ],
            "top_logprobs": [None if logprob is None else self._alternatives(logprob) for _, logprob, _ in rows],
            "text_offset": [offset for _, _, offset in rows],
        }

    def _echo_offsets(self, echo: Echo) -> list[int]:
        """Where each token begins in the echo's text, which shows a special token only if the client wrote it there."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        offsets, offset = [], 0
        for token_id, _ in echo.tokens:
            offsets.append(offset)
            if token_id not in self._vocabulary.special_ids:
                offset += len(decoder.decode(self._vocabulary.raw_bytes(token_id)))
            elif echo.text.startswith(text := self._vocabulary.token_text(token_id), offset):
                offset += len(text)
        return offsets

    def _alternatives(self, token: TokenLogprob) -> dict[str, float]:
        """The most likely tokens by text, and the sampled one. Two tokens of the same text: the likelier stays."""
        alternatives: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            alternatives.setdefault(self._vocabulary.token_text(token_id), max(logprob, _LEAST_LOGPROB))
        return alternatives
