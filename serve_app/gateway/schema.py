"""The JSON bodies this server takes, field by field, with their bounds. Anything else in a body is refused by name.

Types and bounds only: what fields mean together is `inbound.py`, decoding and its error messages are `decode.py`.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

Temperature = Annotated[float, Meta(ge=0, le=2)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
TokenCount = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
PositiveCount = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every request body."""


class StreamOptions(Body, frozen=True, kw_only=True):
    """`stream_options`. Obfuscation is padding against traffic analysis, and means nothing here."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(Body, frozen=True, kw_only=True):
    """What chat and completions share."""

    model: str
    max_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    stop: StopString | list[StopString] | None = None
    # vLLM's GPU sampler holds 128 in all, the model's own ends of sequence among them, and dies of more (vLLM 0.32,
    # `v1/worker/gpu/sample/logit_bias.py`); it takes 1,024 biases.
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    n: Annotated[int, Meta(ge=1, le=1024)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    logit_bias: Annotated[dict[int, Bias], Meta(max_length=1024)] | None = None
    min_tokens: TokenCount | None = None
    ignore_eos: bool | None = None
    truncate_prompt_tokens: PositiveCount | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Known to OpenAI and without meaning here: accepted.
    user: str | None = None
    metadata: Any = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class ContentPart(Body, frozen=True, kw_only=True):
    """A piece of a message. The media fields are here to be refused with a sentence of their own."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class MessageBody(Body, frozen=True, kw_only=True):
    """A turn. The fields after `name` come back from clients that repeat our answers; only null or empty is taken."""

    role: str
    content: str | Annotated[list[ContentPart], Meta(min_length=1)] | None = None
    name: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[MessageBody], Meta(min_length=1, max_length=65_536)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    # Known to OpenAI and not served here: only the value that asks for nothing is taken.
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /v1/completions`. `prompt` is a text, ids, or a list of either."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    # Known to OpenAI and not served here.
    suffix: str | None = None
    best_of: int | None = None


class TokenizeBody(Body, frozen=True, kw_only=True):
    """`POST /tokenize`: a `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[MessageBody], Meta(min_length=1, max_length=65_536)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
