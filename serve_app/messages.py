"""What crosses a hop. Frozen, plain types only: no Starlette request, tensor, vLLM object or free dictionary.

In the order in which a request meets them:

    gateway  ──TokenizeRequest──▶  tokenizer  ──Tokenized──▶  gateway
    gateway  ──GenerateRequest──▶  postprocess  ──ready bytes, Closing──▶  gateway
    postprocess  ──EngineRequest──▶  engine  ──EngineDelta──▶  postprocess
    every hop  ──HopReport──▶  insight  (once a second, off the path; a gateway's has its ended requests)

Every one of the requests carries a `RequestContext`. Times that end in `_s` are seconds of the wall clock
(`time.time`), since they are compared on several machines.
"""

import enum
import time
from typing import Literal

import msgspec

TokenIds = tuple[int, ...]


class Message(msgspec.Struct, frozen=True):
    """Base of everything that crosses a hop."""


class RequestContext(Message, frozen=True):
    """Who asks, until when, and in which trace.

    `traceparent` is W3C's header, or None outside a trace: the span of the hop that sent this. `sent_s` is when it did,
    so that the time on the way and in Ray's queue belongs to the receiver's queue. `deadline_s` is absolute. Lower
    `priority` goes first.
    """

    request_id: str
    deadline_s: float
    traceparent: str | None = None
    sent_s: float | None = None
    priority: int = 0
    lane: str = "default"
    tenant: str = "default"

    def remaining_s(self) -> float:
        """Seconds left until the deadline; negative once it has passed."""
        return self.deadline_s - time.time()

    @property
    def trace_id(self) -> str | None:
        """32 hexadecimal digits, None outside a trace."""
        return self.traceparent.split("-")[1] if self.traceparent else None

    def sent_now(self, traceparent: str | None) -> "RequestContext":
        """As it goes to the next hop, whose span will be a child of `traceparent`."""
        return msgspec.structs.replace(self, traceparent=traceparent, sent_s=time.time())


class Stage(Message, frozen=True, array_like=True):
    """A measured part of one request's time; `name` is one of `telemetry/names.py`.

    It lies from `begin_s` to `end_s`. Work that comes in `count` pieces, one per token, is summed: `busy_s` is its sum,
    `longest_s` its longest piece, and `pieces` where the longest ones lie.
    """

    name: str
    begin_s: float
    end_s: float
    busy_s: float
    count: int = 1
    longest_s: float = 0.0
    pieces: tuple[tuple[float, float], ...] = ()


class ChatMessage(Message, frozen=True):
    """One turn of a conversation, its content parts already joined into one text."""

    role: str
    content: str
    name: str | None = None


class TokenizeRequest(Message, frozen=True):
    """Text to turn into ids, once: either `messages` or `prompts`. A prompt that is ids is only checked.

    `max_tokens` None asks for as many as the context still holds; `max_tokens_field` is what the client calls it.
    `truncate_prompt_tokens` keeps that many of a prompt's last tokens.
    """

    context: RequestContext
    messages: tuple[ChatMessage, ...] | None = None
    prompts: tuple[str | TokenIds, ...] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    max_tokens: int | None = 0
    max_tokens_field: str = "max_tokens"
    truncate_prompt_tokens: int | None = None
    with_token_texts: bool = False

    def characters(self) -> int:
        """Length of the texts; ids count as nothing, since they are not tokenized."""
        texts = [message.content for message in self.messages or ()]
        texts += [prompt for prompt in self.prompts or () if isinstance(prompt, str)]
        return sum(map(len, texts))


class Tokenized(Message, frozen=True):
    """Ids of each prompt, and how many tokens each may still generate.

    `max_tokens[i]` belongs to `prompt_ids[i]`; `context_tokens` is the model's context length in tokens.
    """

    prompt_ids: tuple[TokenIds, ...]
    max_tokens: tuple[int, ...]
    context_tokens: int
    vocabulary_size: int
    token_texts: tuple[str, ...] | None = None
    stages: tuple[Stage, ...] = ()


class Detokenized(Message, frozen=True):
    """The text of ids."""

    text: str
    stages: tuple[Stage, ...] = ()


class Sampling(Message, frozen=True):
    """How the engine picks tokens; the meaning of each field is vLLM's `SamplingParams` field of the same name."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: TokenIds = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class RequestKind(enum.StrEnum):
    """Which of OpenAI's two response formats to render."""

    CHAT = "chat"
    COMPLETION = "completion"


class GenerateRequest(Message, frozen=True):
    """One HTTP request, tokenized: `len(prompt_ids) × n` choices, numbered prompt by prompt.

    `echo_texts`, when set, has for each prompt the text to send ahead of the completion, None where it is to be made
    from the ids. `discard_output` is `echo` with max_tokens 0: the engine generates one token, because vLLM cannot
    generate none, and nobody sees it.
    """

    context: RequestContext
    kind: RequestKind
    model: str
    created_s: int
    prompt_ids: tuple[TokenIds, ...]
    max_tokens: tuple[int, ...]
    sampling: Sampling
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    include_timings: bool = False
    echo_texts: tuple[str | None, ...] | None = None
    discard_output: bool = False


class EngineRequest(Message, frozen=True):
    """One choice for the engine: ids in, ids out."""

    context: RequestContext
    engine_request_id: str
    prompt_ids: TokenIds
    max_tokens: int
    sampling: Sampling


class TokenLogprob(Message, frozen=True, array_like=True):
    """Log-probability of one token, and the likeliest tokens as far as they were asked for."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


FinishReason = Literal["stop", "length"]


class EngineTimes(Message, frozen=True, array_like=True):
    """When the engine did what; None where it is unknown."""

    queued_s: float | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


class EngineDelta(Message, frozen=True, array_like=True):
    """What the engine produced for one choice since its last delta.

    With `finish_reason` set it is the last one. `ends_with_stop_token` says that the last id is the token that ended
    the text (end of sequence or one of `stop_token_ids`) and no part of it. `prompt_logprobs[i]` is for prompt token i
    and None for the first. `times` come with the first delta and with the last.
    """

    token_ids: TokenIds
    finish_reason: FinishReason | None = None
    ends_with_stop_token: bool = False
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    cached_tokens: int = 0
    times: EngineTimes | None = None


class ChoiceMetrics(Message, frozen=True, array_like=True):
    """One choice's tokens: how many, when the first and the last were made, and the longest gap between two deltas."""

    tokens: int
    first_token_s: float | None = None
    last_token_s: float | None = None
    longest_gap_s: float | None = None
    finish_reason: FinishReason | None = None
    stop_string: bool = False


class GenerateSummary(Message, frozen=True):
    """What the hops behind the gateway say of a request at its end, however it ended."""

    stages: tuple[Stage, ...]
    choices: tuple[ChoiceMetrics, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Closing(Message, frozen=True):
    """The last item of a generation's stream: its last bytes (or the whole body), and what there is to say of it."""

    data: bytes
    summary: GenerateSummary


Operation = Literal["chat", "text_completion", "tokenize", "detokenize"]


class RequestMetrics(Message, frozen=True):
    """Everything that was measured of one HTTP request, once it has ended. None is unknown, never zero.

    `arrived_s` to `ended_s` is its wall time at the gateway; `first_write_s` is when the first byte of the response's
    body was given to the socket. `outcome` and `error` are those of `telemetry/names.py` and `errors.py`.
    """

    request_id: str
    operation: Operation
    model: str
    stream: bool
    arrived_s: float
    ended_s: float
    status: int
    outcome: str
    error: str | None = None
    trace_id: str | None = None
    sampled: bool = False
    tenant: str = "default"
    lane: str = "default"
    first_write_s: float | None = None
    stages: tuple[Stage, ...] = ()
    choices: tuple[ChoiceMetrics, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class LoadReport(Message, frozen=True):
    """One engine's load now. `kv_usage` is the used share of its KV blocks, 0 to 1.

    The others count from the engine's start: sequences it had to preempt, prompt tokens looked up in the prefix cache
    and found there.
    """

    running: int
    waiting: int
    kv_usage: float
    kv_blocks: int
    preemptions: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0


class GpuReport(Message, frozen=True):
    """One GPU now: shares 0 to 1 of the last sampling period, memory in bytes; None where it cannot be read.

    `compute` is the share of time in which a kernel ran, `memory_bandwidth` that in which memory was read or written
    (NVML's two utilization rates). `peak_bytes` and `mean_bytes` are over the samples since the replica started.
    """

    index: int
    name: str
    compute: float | None
    memory_bandwidth: float | None
    used_bytes: int | None
    total_bytes: int | None
    peak_bytes: int | None
    mean_bytes: float | None


class HopReport(Message, frozen=True):
    """What one replica says of itself now.

    `in_flight` are the requests it works on, `queued` those that wait inside it. `dropped_spans` and `exported_spans`
    count from its start, as do `dropped_requests`, which never reached the history. `requests` have ended since the
    last report (a gateway's).
    """

    hop: str
    replica: str
    reported_s: float
    in_flight: int
    queued: int
    exported_spans: int = 0
    dropped_spans: int = 0
    dropped_requests: int = 0
    load: LoadReport | None = None
    gpus: tuple[GpuReport, ...] = ()
    requests: tuple[RequestMetrics, ...] = ()


class PathReport(Message, frozen=True):
    """What answers a readiness probe, collected on the way back: an engine's load, and the asyncio tasks of each hop's
    replica that the probe met. At rest the tasks are a constant; a number that grows is a leak."""

    engine: LoadReport
    tasks: dict[str, int]

    def with_tasks(self, hop: str, tasks: int) -> "PathReport":
        """The report with one more hop's tasks in it."""
        return msgspec.structs.replace(self, tasks=self.tasks | {hop: tasks})
