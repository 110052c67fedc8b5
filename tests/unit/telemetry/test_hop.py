"""A hop's span ends as the hop's work ended, and passes on whatever ended it."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from receiver import ReceivedSpan, Receiver

from serve_app.errors import ContextTooLong, EngineDied, InternalError, RequestError
from serve_app.messages import RequestContext
from serve_app.telemetry import logs
from serve_app.telemetry.hop import CANCELLED, hop_span
from serve_app.telemetry.tracing import HopSpan, Tracing

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SENT_S = 1_700_000_000.0


def context(sent_s: float | None = SENT_S, flags: str = "01") -> RequestContext:
    return RequestContext("r-1", time.time() + 60, f"00-{TRACE}-{CALLER}-{flags}", sent_s)


@pytest.fixture
def tracing(tracer: Callable[..., Tracing]) -> Tracing:
    return tracer("tokenizer")


def received(receiver: Receiver) -> ReceivedSpan:
    receiver.wait_for(1)
    (span,) = receiver.spans()
    return span


def raising(tracing: Tracing, error: BaseException) -> None:
    with hop_span(tracing, "tokenizer", context()):
        raise error


def test_the_span_is_the_callers_child_and_begins_when_the_caller_let_go(tracing: Tracing, receiver: Receiver) -> None:
    before_s = time.time()
    with hop_span(tracing, "tokenizer", context()) as span:
        assert span.sampled
        assert receiver.asked == 0
    one = received(receiver)
    assert (one.name, one.kind, one.trace_id, one.parent_id) == ("tokenizer", "server", TRACE, CALLER)
    assert (one.start_s, one.status, one.attributes) == (SENT_S, "unset", {})
    assert one.end_s >= before_s - 1e-6


@pytest.mark.parametrize("sent_s", [None, 4_000_000_000.0])
def test_without_a_past_moment_of_sending_it_begins_now(
    tracing: Tracing, receiver: Receiver, sent_s: float | None
) -> None:
    before_s = time.time()
    with hop_span(tracing, "tokenizer", context(sent_s)):
        pass
    one = received(receiver)
    assert before_s - 1e-6 <= one.start_s <= one.end_s <= time.time()


def test_the_work_may_end_its_span_itself(tracing: Tracing, receiver: Receiver) -> None:
    with hop_span(tracing, "tokenizer", context()) as span:
        span.end(SENT_S + 1)
    assert received(receiver).end_s == SENT_S + 1
    tracing.shutdown()
    assert tracing.exported_spans == 1


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit()])
def test_a_caller_that_gave_up_is_a_mark_and_no_failure(
    tracing: Tracing, receiver: Receiver, error: BaseException
) -> None:
    with pytest.raises(type(error)) as passed:
        raising(tracing, error)
    assert passed.value is error
    one = received(receiver)
    assert (one.status, one.attributes) == ("unset", {"error.type": CANCELLED})


def test_a_generator_that_is_closed_ends_its_span(tracing: Tracing, receiver: Receiver) -> None:
    async def deltas() -> Any:
        with hop_span(tracing, "tokenizer", context()):
            yield 1
            yield 2

    async def take_one() -> None:
        stream = deltas()
        assert await anext(stream) == 1
        await stream.aclose()

    asyncio.run(take_one())
    assert received(receiver).attributes == {"error.type": CANCELLED}


REFUSAL = ContextTooLong("my secret does not fit", "messages")
FAILURE = EngineDied("the engine died")


@pytest.mark.parametrize(
    ("error", "status", "message", "code"),
    [
        # What a refusal says of a field may quote it.
        (REFUSAL, "unset", "", REFUSAL.code),
        (FAILURE, "error", "the engine died", FAILURE.code),
        # What any other exception says is not ours to repeat.
        (ValueError("my secret"), "error", "", InternalError.code),
    ],
)
def test_an_error_is_named_and_passes_and_quotes_nobody(
    tracing: Tracing, receiver: Receiver, error: Exception, status: str, message: str, code: str
) -> None:
    with pytest.raises(type(error)) as passed:
        raising(tracing, error)
    assert passed.value is error
    one = received(receiver)
    assert (one.status, one.status_message, one.attributes) == (status, message, {"error.type": code})


def test_every_error_of_the_tree_ends_a_span(tracing: Tracing, receiver: Receiver) -> None:
    def tree(error: type[RequestError]) -> list[type[RequestError]]:
        return [error, *(below for child in error.__subclasses__() for below in tree(child))]

    # Not those that Ray has made of them meanwhile.
    errors = [one for one in tree(RequestError)[1:] if one.__module__ == RequestError.__module__]
    assert len(errors) > 5
    for error in errors:
        with pytest.raises(error):
            raising(tracing, error("sentence"))
    receiver.wait_for(len(errors))
    assert sorted((one.attributes["error.type"], one.status) for one in receiver.spans()) == sorted(
        (one.code, "error" if one.status >= 500 else "unset") for one in errors
    )


@pytest.mark.parametrize("error", [None, FAILURE, ValueError("x")])
def test_a_trace_that_is_not_recorded_costs_no_span_and_changes_no_ending(
    tracing: Tracing, receiver: Receiver, error: Exception | None
) -> None:
    opened: list[HopSpan] = []

    def work() -> None:
        with hop_span(tracing, "tokenizer", context(flags="00")) as span:
            opened.append(span)
            if error is not None:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(type(error)):
            work()
    assert (opened[0].sampled, opened[0].trace_id) == (False, TRACE)
    tracing.shutdown()
    assert (tracing.exported_spans, tracing.dropped_spans, receiver.spans()) == (0, 0, [])


def test_the_log_lines_inside_are_the_requests() -> None:
    async def work() -> tuple[str, str | None]:
        with hop_span(Tracing(None, None, False), "tokenizer", context()):
            return logs._context.get()

    assert asyncio.run(work()) == ("r-1", TRACE)
