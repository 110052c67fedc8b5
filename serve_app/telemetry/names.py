"""Every name that leaves the process: stages (which are the spans too), span attributes, and where a request belongs.

Attributes that start with `gen_ai.`, `http.`, `url.` and `error.` are OpenTelemetry's; the others are ours. The
constants of OpenTelemetry's Python package for `gen_ai` are deprecated, so they stand here. Metrics are in
`metrics.py`.
"""

from typing import Literal

# Spans of a hop's whole work; all others are stages, which are their children.
GATEWAY = "gateway"
TOKENIZER = "tokenizer"
POSTPROCESS = "postprocess"

AUTH = "gateway.auth"
READ = "gateway.read"
TOKENIZER_QUEUE = "tokenizer.queue"
TEMPLATE = "tokenizer.template"
ENCODE = "tokenizer.encode"
POSTPROCESS_QUEUE = "postprocess.queue"
ENGINE_QUEUE = "engine.queue"
PREFILL = "prefill"
KV_TRANSFER = "kv_transfer"
DECODE = "decode"
DETOKENIZE = "postprocess.detokenize"
RENDER = "postprocess.render"
WRITE = "gateway.write"

# In the order in which a request meets them. Where two overlap, the later one has the time (`account.py`).
STAGES = (
    AUTH,
    READ,
    TOKENIZER_QUEUE,
    TEMPLATE,
    ENCODE,
    POSTPROCESS_QUEUE,
    ENGINE_QUEUE,
    PREFILL,
    KV_TRANSFER,
    DECODE,
    DETOKENIZE,
    RENDER,
    WRITE,
)
# What no stage covers: the way between the hops, and waiting event loops.
UNACCOUNTED = "unaccounted"

PROVIDER = "tokenline"

# The longest prompt of a bucket, in tokens.
SHORT_BELOW_TOKENS = 200
MEDIUM_UP_TO_TOKENS = 1000

Length = Literal["short", "medium", "long", "unknown"]
LENGTHS: tuple[Length, ...] = ("short", "medium", "long", "unknown")


def length_bucket(prompt_tokens: int | None) -> Length:
    """The bucket of a prompt of this many tokens; `unknown` where it was never counted."""
    if prompt_tokens is None:
        return "unknown"
    if prompt_tokens < SHORT_BELOW_TOKENS:
        return "short"
    return "medium" if prompt_tokens <= MEDIUM_UP_TO_TOKENS else "long"


# How a request ended. `refused`: turned away before any work. `disconnected`: its client left.
Outcome = Literal["ok", "invalid", "refused", "timeout", "disconnected", "error"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "invalid", "refused", "timeout", "disconnected", "error")
DISCONNECTED = "client_disconnected"  # `error.type` of a request whose client left


def outcome_of(status: int, error_code: str | None) -> Outcome:
    """From the HTTP status that the error stands for (499: the client left) and its code; None is no error."""
    if error_code is None:
        return "ok"
    if status == 499:
        return "disconnected"
    if error_code in ("overloaded", "not_ready", "unavailable"):
        return "refused"
    if status in (408, 504):
        return "timeout"
    return "invalid" if status < 500 else "error"
