"""A checked body as the hops behind the gateway need it: what its fields mean together, and what is not served.

Pure. Field types and bounds are `schema.py`; what happens next is `serve_app/path.py`.
"""

import time
from dataclasses import dataclass
from typing import Any

from serve_app.config import GatewaySection
from serve_app.errors import InvalidRequest, UnsupportedField
from serve_app.gateway.schema import (
    Body,
    ChatBody,
    CompletionBody,
    ContentPart,
    GenerationBody,
    MessageBody,
    TokenizeBody,
)
from serve_app.messages import (
    ChatMessage,
    GenerateRequest,
    RequestContext,
    RequestKind,
    Sampling,
    TokenIds,
    Tokenized,
    TokenizeRequest,
)

# OpenAI's own default for completions; chat may fill the context.
_COMPLETION_MAX_TOKENS = 16

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# Fields of OpenAI's that are not served, and the values that ask for nothing and are taken.
_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None,),
    "web_search_options": (None,),
    "suffix": (None, ""),
}


@dataclass(frozen=True, slots=True)
class Inbound:
    """One generation request, the same for chat and completions."""

    kind: RequestKind
    model: str
    messages: tuple[ChatMessage, ...] | None
    prompts: tuple[str | TokenIds, ...] | None
    max_tokens: int | None
    max_tokens_field: str
    truncate_prompt_tokens: int | None
    sampling: Sampling
    n: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    echo: bool
    include_timings: bool = False

    @property
    def discards_output(self) -> bool:
        """`max_tokens: 0` with `echo` scores a prompt; vLLM must generate a token, which nobody sees."""
        return self.max_tokens == 0

    def tokenize_request(self, context: RequestContext) -> TokenizeRequest:
        """For the tokenizer hop."""
        return TokenizeRequest(
            context=context,
            messages=self.messages,
            prompts=self.prompts,
            max_tokens=1 if self.discards_output else self.max_tokens,
            max_tokens_field=self.max_tokens_field,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )

    def generate_request(self, context: RequestContext, tokenized: Tokenized) -> GenerateRequest:
        """For the postprocess hop. Raises InvalidRequest for ids that the vocabulary, known only now, does not have."""
        for name, ids in (
            ("stop_token_ids", self.sampling.stop_token_ids),
            ("logit_bias", self.sampling.logit_bias or {}),
        ):
            for token_id in ids:
                if not 0 <= token_id < tokenized.vocabulary_size:
                    raise InvalidRequest(
                        f"{name}: {token_id} is not a token id; they go from 0 to {tokenized.vocabulary_size - 1}.",
                        name,
                    )
        if self.sampling.min_tokens > min(tokenized.max_tokens):
            raise InvalidRequest(
                f"min_tokens: {self.sampling.min_tokens} is more than the {min(tokenized.max_tokens)} tokens that fit.",
                "min_tokens",
            )
        # A truncated prompt is no longer the text that came in.
        as_sent = self.truncate_prompt_tokens is None
        echo_texts = tuple(prompt if isinstance(prompt, str) and as_sent else None for prompt in self.prompts or ())
        return GenerateRequest(
            context=context,
            kind=self.kind,
            model=self.model,
            created_s=int(time.time()),
            prompt_ids=tokenized.prompt_ids,
            max_tokens=tokenized.max_tokens,
            sampling=self.sampling,
            n=self.n,
            stop=self.stop,
            stream=self.stream,
            include_usage=self.include_usage,
            include_timings=self.include_timings,
            echo_texts=echo_texts if self.echo else None,
            discard_output=self.discards_output,
        )


def from_chat(body: ChatBody, limits: GatewaySection) -> Inbound:
    """A chat request. Raises InvalidRequest or UnsupportedField."""
    _refuse_unsupported(body)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true.", "top_logprobs")
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        if max_tokens not in (None, body.max_completion_tokens):
            raise InvalidRequest("max_tokens: differs from max_completion_tokens; give one of them.", "max_tokens")
        max_tokens = body.max_completion_tokens
    if max_tokens == 0:
        name = "max_tokens" if body.max_tokens == 0 else "max_completion_tokens"
        raise InvalidRequest(f"{name}: must be at least 1.", name)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return Inbound(
        kind=RequestKind.CHAT,
        messages=chat_messages(body.messages),
        prompts=None,
        max_tokens_field="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        echo=False,
        **_shared(body, limits, 1, max_tokens, logprobs, echo=False),
    )


def from_completion(body: CompletionBody, limits: GatewaySection) -> Inbound:
    """A completion request. Raises InvalidRequest or UnsupportedField."""
    _refuse_unsupported(body)
    if body.best_of not in (None, body.n or 1):
        raise UnsupportedField("best_of: other than n is not served here.", "best_of")
    echo = bool(body.echo)
    if body.max_tokens == 0 and not echo:
        raise InvalidRequest("max_tokens: must be at least 1, except with echo.", "max_tokens")
    prompts = _prompts(body.prompt)
    max_tokens = _COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return Inbound(
        kind=RequestKind.COMPLETION,
        messages=None,
        prompts=prompts,
        max_tokens_field="max_tokens",
        echo=echo,
        **_shared(body, limits, len(prompts), max_tokens, body.logprobs, echo),
    )


def from_tokenize(body: TokenizeBody, context: RequestContext) -> TokenizeRequest:
    """`POST /tokenize`. Raises InvalidRequest."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt: give either prompt or messages.", "prompt")
    return TokenizeRequest(
        context=context,
        messages=None if body.messages is None else chat_messages(body.messages),
        prompts=None if body.prompt is None else (body.prompt,),
        add_generation_prompt=body.add_generation_prompt is not False,
        add_special_tokens=body.add_special_tokens is not False,
        with_token_texts=bool(body.return_token_strs),
    )


def chat_messages(bodies: list[MessageBody]) -> tuple[ChatMessage, ...]:
    """Turns with their text parts joined. Raises InvalidRequest or UnsupportedField, naming the message's field."""
    return tuple(_chat_message(body, f"messages[{index}]") for index, body in enumerate(bodies))


def _chat_message(body: MessageBody, path: str) -> ChatMessage:
    role = _ROLES.get(body.role)
    if role is None:
        served = ", ".join(_ROLES)
        raise InvalidRequest(f"{path}.role: {body.role[:50]!r} is not served; use one of {served}.", f"{path}.role")
    _refuse_set(body, ("refusal", "annotations", "audio", "function_call", "tool_calls", "tool_call_id"), path)
    if body.content is None and role != "assistant":
        raise InvalidRequest(f"{path}.content: required, and missing.", f"{path}.content")
    if body.content is None or isinstance(body.content, str):
        return ChatMessage(role, body.content or "", body.name)
    texts = [_part_text(part, f"{path}.content[{number}]") for number, part in enumerate(body.content)]
    # As vLLM joins text parts.
    return ChatMessage(role, "\n".join(texts), body.name)


def _part_text(part: ContentPart, path: str) -> str:
    if part.type != "text":
        raise UnsupportedField(
            f"{path}.type: {part.type[:50]!r} is not served; this server takes text parts.", f"{path}.type"
        )
    _refuse_set(part, ("image_url", "input_audio", "file", "refusal"), path)
    if part.text is None:
        raise InvalidRequest(f"{path}.text: required, and missing.", f"{path}.text")
    return part.text


def _refuse_set(body: Body, names: tuple[str, ...], path: str) -> None:
    """Fields that clients send empty when they repeat an answer of ours, and that are not served with content."""
    for name in names:
        if getattr(body, name) not in (None, [], ""):
            raise UnsupportedField(f"{path}.{name}: not served here.", f"{path}.{name}")


def _refuse_unsupported(body: GenerationBody) -> None:
    for name, harmless in _ASKS_FOR_NOTHING.items():
        if getattr(body, name, None) not in harmless:
            raise UnsupportedField(f"{name}: not served here.", name)


def _prompts(prompt: str | list[Any]) -> tuple[str | TokenIds, ...]:
    """A text, ids, or a list of either, as a tuple of prompts."""
    if isinstance(prompt, str):
        return (prompt,)
    if all(isinstance(item, int) for item in prompt):
        return (tuple(prompt),)
    if all(isinstance(item, str) for item in prompt):
        return tuple(prompt)
    if all(isinstance(item, list) for item in prompt):
        return tuple(map(tuple, prompt))
    raise InvalidRequest("prompt: texts, ids and lists of ids cannot be mixed.", "prompt")


def _shared(
    body: GenerationBody, limits: GatewaySection, prompts: int, max_tokens: int | None, logprobs: int | None, echo: bool
) -> dict[str, Any]:
    """The fields of `Inbound` that chat and completions fill alike, from a body with this many prompts."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > limits.max_stops:
        raise InvalidRequest(f"stop: {len(stop)} strings, and at most {limits.max_stops} are taken.", "stop")
    n = 1 if body.n is None else body.n
    if n * prompts > limits.max_choices:
        name, count = ("n", n) if n > 1 else ("prompt", prompts)
        most = f"one request may have {limits.max_choices}"
        raise InvalidRequest(f"{name}: {count} of them make {n * prompts} choices; {most}.", name)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: needs stream to be true.", "stream_options")
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens: {min_tokens} is more than max_tokens, {max_tokens}.", "min_tokens")
    return {
        "model": body.model,
        "max_tokens": max_tokens,
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "sampling": _sampling(body, min_tokens, logprobs, echo),
        "n": n,
        "stop": stop,
        "stream": bool(body.stream),
        "include_usage": bool(body.stream_options and body.stream_options.include_usage),
    }


def _sampling(body: GenerationBody, min_tokens: int, logprobs: int | None, echo: bool) -> Sampling:
    """Every field that is null or absent at OpenAI's default."""
    given = {
        name: value
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "seed",
            "ignore_eos",
            "logit_bias",
        )
        if (value := getattr(body, name)) is not None
    }
    return Sampling(
        **given,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        min_tokens=min_tokens,
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )
