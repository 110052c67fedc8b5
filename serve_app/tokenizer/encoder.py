"""Chat template and tokenization of one request, and the check against the model's context.

Plain functions of text: no asyncio, no Ray. Runs in threads of the tokenizer hop (`service.py`), which bounds its time.
"""

import time
from typing import Any

from serve_app.errors import ContextTooLong, InvalidRequest
from serve_app.messages import ChatMessage, Detokenized, Stage, TokenIds, Tokenized, TokenizeRequest
from serve_app.telemetry.names import ENCODE, TEMPLATE
from serve_app.telemetry.stages import stage
from serve_app.tokenizer.segments import SegmentCache
from serve_app.vocabulary import Vocabulary


class PromptEncoder:
    """One model's tokenizer. Safe to use from several threads. `cache_bytes` may be kept of messages seen before."""

    def __init__(self, tokenizer: Any, context_tokens: int, cache_bytes: int = 0) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # Limits that a tokenizer file may carry would cut prompts in silence.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._segments = SegmentCache(self._backend, cache_bytes)
        self._vocabulary = Vocabulary(tokenizer)
        self._context_tokens = context_tokens
        # Without a normalizer no token stands for more bytes than the longest one has, so some texts need no tokenizing
        # to be too long.
        self._most_bytes = None if self._backend.normalizer else context_tokens * self._vocabulary.longest_token_bytes

    def encode(self, request: TokenizeRequest) -> Tokenized:
        """Ids of all prompts, each checked to fit. Raises InvalidRequest or ContextTooLong."""
        begun_s = time.time()
        stages: list[Stage] = []
        if request.messages is not None:
            text = self._render(request.messages, request.add_generation_prompt)
            stages.append(stage(TEMPLATE, begun_s))
            prompts = [self._encode_text(text, "messages", False, request.truncate_prompt_tokens)]
        else:
            prompts = [self._prompt_ids(prompt, request) for prompt in request.prompts or ()]
        if (keep := request.truncate_prompt_tokens) is not None:
            prompts = [ids[-keep:] for ids in prompts]
        param = "prompt" if request.messages is None else "messages"
        room = [self._room(len(ids), request, param) for ids in prompts]
        texts = [self._vocabulary.token_text(token_id) for token_id in prompts[0]] if request.with_token_texts else None
        return Tokenized(
            prompt_ids=tuple(prompts),
            max_tokens=tuple(room),
            context_tokens=self._context_tokens,
            vocabulary_size=self._vocabulary.size,
            token_texts=None if texts is None else tuple(texts),
            stages=(*stages, stage(ENCODE, stages[0].end_s if stages else begun_s)),
        )

    def decode(self, ids: TokenIds) -> Detokenized:
        """The text of `ids`, special tokens included. Raises InvalidRequest for an id outside the vocabulary."""
        begun_s = time.time()
        self._check_ids(ids, "tokens")
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return Detokenized(text, (stage(ENCODE, begun_s),))

    def _render(self, messages: tuple[ChatMessage, ...], add_generation_prompt: bool) -> str:
        turns = [
            {"role": message.role, "content": message.content}
            | ({} if message.name is None else {"name": message.name})
            for message in messages
        ]
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:
            raise InvalidRequest(
                f"messages: the model's chat template does not take them: {error}", "messages"
            ) from error
        return text

    def _prompt_ids(self, prompt: str | TokenIds, request: TokenizeRequest) -> TokenIds:
        if isinstance(prompt, str):
            return self._encode_text(prompt, "prompt", request.add_special_tokens, request.truncate_prompt_tokens)
        self._check_ids(prompt, "prompt")
        return prompt

    def _encode_text(self, text: str, param: str, special_tokens: bool, keep: int | None) -> TokenIds:
        size = len(text.encode("utf-8"))
        if self._most_bytes is not None and size > self._most_bytes and keep is None:
            least = size // self._vocabulary.longest_token_bytes
            raise ContextTooLong(
                f"{param}: the text has at least {least} tokens; this model's context holds {self._context_tokens}.",
                param,
            )
        if not special_tokens:
            return self._segments.encode(text)
        # `encode_batch` lets go of the GIL, `encode` holds it (tokenizers 0.23, measured): seconds of standstill for a
        # long text.
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=special_tokens)
        return tuple(encoding.ids)

    def _check_ids(self, ids: TokenIds, param: str) -> None:
        for token_id in ids:
            if not 0 <= token_id < self._vocabulary.size:
                raise InvalidRequest(
                    f"{param}: {token_id} is not a token id; they go from 0 to {self._vocabulary.size - 1}.", param
                )

    def _room(self, prompt_tokens: int, request: TokenizeRequest, param: str) -> int:
        """Tokens that may be generated after a prompt of this length."""
        if prompt_tokens == 0:
            raise InvalidRequest(f"{param}: empty.", param)
        room = self._context_tokens - prompt_tokens
        wanted = 1 if request.max_tokens is None else request.max_tokens
        field = request.max_tokens_field
        if wanted > room:
            raise ContextTooLong(
                f"The model's context holds {self._context_tokens} tokens; the request needs {prompt_tokens + wanted}: "
                f"{prompt_tokens} of the prompt and {wanted} of the completion. "
                + (f"At most {room} fit: lower {field} or shorten {param}." if room > 0 else f"Shorten {param}."),
                param if room < 1 else field,
            )
        return room if request.max_tokens is None else request.max_tokens
