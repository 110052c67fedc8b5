"""What the trace of one chat looks like, wherever it is served: (name, parent's name, kind, service) of each span."""

from collections.abc import Iterable

from receiver import ReceivedSpan

from serve_app.telemetry import names

Tree = set[tuple[str, str | None, str, str]]

CHAT: Tree = {
    ("gateway", None, "server", "gateway"),
    ("gateway.auth", "gateway", "internal", "gateway"),
    ("gateway.read", "gateway", "internal", "gateway"),
    ("gateway.write", "gateway", "internal", "gateway"),
    ("tokenizer", "gateway", "server", "tokenizer"),
    ("tokenizer.queue", "tokenizer", "internal", "tokenizer"),
    ("tokenizer.template", "tokenizer", "internal", "tokenizer"),
    ("tokenizer.encode", "tokenizer", "internal", "tokenizer"),
    ("postprocess", "gateway", "server", "postprocess"),
    ("postprocess.queue", "postprocess", "internal", "postprocess"),
    ("postprocess.detokenize", "postprocess", "internal", "postprocess"),
    ("postprocess.render", "postprocess", "internal", "postprocess"),
    ("engine.queue", "postprocess", "internal", "engine"),
    ("prefill", "postprocess", "internal", "engine"),
    ("decode", "postprocess", "internal", "engine"),
}
CHAT_SPANS = tuple(sorted(name for name, *_ in CHAT))

# Each field of the config's `delays`, and the stage that it is to be seen in.
DELAYS = {
    "template_ms": names.TEMPLATE,
    "encode_ms": names.ENCODE,
    "engine_queue_ms": names.ENGINE_QUEUE,
    "prefill_ms": names.PREFILL,
    "detokenize_ms": names.DETOKENIZE,
    "write_ms": names.WRITE,
}


def tree(spans: Iterable[ReceivedSpan]) -> Tree:
    """The tree of one trace's spans."""
    spans = list(spans)
    by_id = {one.span_id: one.name for one in spans}
    return {(one.name, by_id.get(one.parent_id or ""), one.kind, one.service) for one in spans}


def took(spans: Iterable[ReceivedSpan]) -> dict[str, float]:
    """Seconds of each stage, of several traces the quickest: a busy machine makes each of them wait somewhere, but not
    always in the same place."""
    seconds: dict[str, float] = {}
    for one in spans:
        if one.name in names.STAGES:
            seconds[one.name] = min(one.end_s - one.start_s, seconds.get(one.name, float("inf")))
    return seconds
