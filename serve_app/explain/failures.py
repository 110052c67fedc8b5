"""The rule for requests that failed: each error code with what it means and what changes it. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.errors import (
    BacklogFull,
    BodyTimeout,
    DeadlineExceeded,
    EngineDied,
    HopUnavailable,
    InternalError,
    NotReady,
    Overloaded,
)
from serve_app.explain.levers import Lever
from serve_app.explain.symptom import Symptom, percent
from serve_app.telemetry.measured import Measured, add_up, largest
from serve_app.telemetry.names import (
    AUTH,
    DISCONNECTED,
    ENGINE_QUEUE,
    POSTPROCESS_QUEUE,
    READ,
    TOKENIZER_QUEUE,
    UNACCOUNTED,
)

OUT_OF_MEMORY = "out_of_memory"
_LESS_MEMORY = (
    Lever("engine.max_sequences", "fewer sequences at once"),
    Lever("model.context_tokens", "less: the longest sequence decides the memory"),
    Lever("engine.gpu_memory_utilization", "less: leave room for activations"),
    Lever("engine.quantization", "smaller weights"),
)


@dataclass(frozen=True, slots=True)
class Failure:
    """How a kind of error is called here, and what it means."""

    name: str
    meaning: str
    levers: tuple[Lever, ...] = ()


FAILURES: dict[str, Failure] = {
    OUT_OF_MEMORY: Failure("out of memory", "a GPU's memory did not hold what the batch needed", _LESS_MEMORY),
    EngineDied.code: Failure(
        "engine died", "an engine was lost while it worked; its log has the cause, and names it if memory ran out"
    ),
    DeadlineExceeded.code: Failure(
        "timeouts",
        "the deadline passed",
        (Lever("gateway.request_timeout_s", "more, only if clients would wait longer"),),
    ),
    BodyTimeout.code: Failure(
        "timeouts of the body",
        "the client did not deliver its request in time",
        (Lever("gateway.body_timeout_s", "more, if clients are that slow"),),
    ),
    Overloaded.code: Failure(
        "refused",
        "a queue was full",
        tuple(
            Lever(f"{hop}.max_queued_requests", f"more may wait for the {hop}, and longer")
            for hop in ("tokenizer", "postprocess", "engine")
        ),
    ),
    BacklogFull.code: Failure(
        "not read",
        "the answer was made faster than a client or a hop read it",
        (Lever("channel.max_backlog_items", "more, if clients may lag that far behind"),),
    ),
    HopUnavailable.code: Failure("no replica", "a hop had no replica that could take the request"),
    NotReady.code: Failure("not ready", "requests came before the path had answered its warm-up; see /ready"),
    InternalError.code: Failure("internal errors", "something outside the error tree; the log has it under the id"),
    DISCONNECTED: Failure("clients left", "the client closed the connection before its answer was complete"),
}
# Of these the layer is the queue that they did not get past, not where their time went.
_TURNED_AWAY = (Overloaded.code, HopUnavailable.code)
_SERVER_SIDE = ("refused", "timeout", "disconnected", "error")


def errors(measured: Sequence[Measured]) -> list[Symptom]:
    """One symptom for each kind of error that is not the client's mistake, the most frequent first."""
    failed = [one for one in measured if one.request.outcome in _SERVER_SIDE]
    counts = Counter(one.request.error or "unknown" for one in failed)
    return [
        _symptom(code, [one for one in failed if (one.request.error or "unknown") == code], len(measured))
        for code, _ in counts.most_common()
    ]


def _symptom(code: str, failed: Sequence[Measured], requests: int) -> Symptom:
    kind = FAILURES.get(code, Failure(code, "an error that this version does not know"))
    counted = f"{len(failed)} of {requests} requests ({percent(len(failed) / requests)}) ended with {code}"
    layer, place = _place(code, failed)
    return Symptom(f"errors: {kind.name}", True, f"{counted}: {kind.meaning}; {place}", layer, kind.levers)


def _place(code: str, failed: Sequence[Measured]) -> tuple[str | None, str]:
    """The layer that they failed in, and the end of a sentence that says so."""
    if code in _TURNED_AWAY:
        layer = Counter(map(_next_queue, failed)).most_common(1)[0][0]
        return layer, f"they did not get past {layer}"
    found = largest(add_up(one.account.parts for one in failed))
    if found is None:
        return None, "in which layer is unknown"
    return found[0], f"{percent(found[1])} of their time is {found[0]}"


def _next_queue(one: Measured) -> str:
    """The queue behind the last stage that the request reached."""
    reached = set(one.account.parts) - {AUTH, READ, UNACCOUNTED}
    if not reached:
        return TOKENIZER_QUEUE
    return ENGINE_QUEUE if POSTPROCESS_QUEUE in reached else POSTPROCESS_QUEUE
