"""Requests made up stage by stage, for the rules of `tokenline explain`."""

from typing import Any

from serve_app.messages import ChoiceMetrics, RequestMetrics, Stage
from serve_app.telemetry import names

# A fast request, in seconds; about a third of it before the first token.
FAST = {
    names.AUTH: 0.0002,
    names.READ: 0.0003,
    names.TOKENIZER_QUEUE: 0.001,
    names.TEMPLATE: 0.002,
    names.ENCODE: 0.001,
    names.POSTPROCESS_QUEUE: 0.001,
    names.ENGINE_QUEUE: 0.001,
    names.PREFILL: 0.015,
    names.DECODE: 0.04,
    names.DETOKENIZE: 0.001,
    names.RENDER: 0.001,
    names.WRITE: 0.001,
}
_TOKENS = 21


def made(at_s: float = 0.0, gap: float = 0.0005, prompt_tokens: int | None = 100, **given: Any) -> RequestMetrics:
    """`make(prefill=2.0, engine__queue=1.0, at_s=5.0)`: a fast request with these stages' seconds in place of its own.

    `__` stands for the dot of a stage's name. `gap` is time that no stage covers, `fields` what else the request has.
    What is done for each token has a first piece inside the decode and the rest after it.
    """
    fields = given.pop("fields", {})
    seconds = FAST | {name.replace("__", "."): value for name, value in given.items()}
    arrived_s = now_s = 1_700_000_000.0 + at_s
    stages = []
    for name in names.STAGES[: names.STAGES.index(names.DECODE)]:
        if name in seconds:
            stages.append(Stage(name, now_s, now_s + seconds[name], seconds[name], 1, seconds[name]))
            now_s += seconds[name]
    now_s += gap
    end_s = now_s + seconds[names.DECODE]
    stages.append(Stage(names.DECODE, now_s, end_s, seconds[names.DECODE], 1, seconds[names.DECODE]))
    first_s, last_s = now_s, end_s
    for name in (names.DETOKENIZE, names.RENDER, names.WRITE):
        # One piece after the first token, one with the rest at the end.
        pieces = ((now_s, now_s + 0.0001), (end_s, end_s + seconds[name]))
        busy_s = sum(end - begin for begin, end in pieces)
        stages.append(Stage(name, now_s, pieces[1][1], busy_s, 2, seconds[name], pieces))
        end_s = pieces[1][1]
    whole = {
        "request_id": "r1",
        "operation": "chat",
        "model": "m",
        "stream": True,
        "arrived_s": arrived_s,
        "ended_s": end_s,
        "status": 200,
        "outcome": "ok",
        "first_write_s": first_s,
        "stages": tuple(stages),
        "choices": (ChoiceMetrics(_TOKENS, first_s, last_s),),
        "prompt_tokens": prompt_tokens,
        "completion_tokens": _TOKENS,
    }
    return RequestMetrics(**(whole | fields))


def turned_away(*reached: str, code: str = "overloaded", outcome: str = "refused", status: int = 429) -> RequestMetrics:
    """A request that was turned away after the stages of these names."""
    whole = made()
    stages = tuple(stage for stage in whole.stages if stage.name in reached)
    fields = {"stages": stages, "choices": (), "first_write_s": None, "error": code, "outcome": outcome}
    return made(fields=fields | {"status": status, "ended_s": whole.arrived_s + 0.01, "completion_tokens": None})
