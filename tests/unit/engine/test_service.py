"""The engine hop: the phases of a request as spans, however it ends, and nothing past its deadline."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from receiver import ReceivedSpan, Receiver
from streams import collected, stream_of

from serve_app.config import TracingSection
from serve_app.engine.service import EngineService
from serve_app.errors import DeadlineExceeded, EngineDied, InvalidRequest
from serve_app.messages import EngineDelta, EngineRequest, EngineTimes, LoadReport, RequestContext, Sampling
from serve_app.telemetry.tracing import Tracing, start

PARENT = "1" * 16


class ScriptedEngine:
    """Yields what it is told; an exception is raised, and None waits for ever."""

    def __init__(self, *script: Any) -> None:
        self._script = script

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def load(self) -> LoadReport:
        return LoadReport(0, 0, 0.0, 1)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        for step in self._script:
            if step is None:
                await asyncio.Event().wait()
            if isinstance(step, Exception):
                raise step
            yield step


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def tracing(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracing]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    receiver.clear()
    tracing = start(TracingSection(endpoint=receiver.grpc_url), "engine", "engine-0", "m")
    yield tracing
    tracing.shutdown()


def request(remaining_s: float = 60.0, flags: str = "01") -> EngineRequest:
    now_s = time.time()
    context = RequestContext("r", now_s + remaining_s, f"00-{'a' * 32}-{PARENT}-{flags}", sent_s=now_s - 5)
    return EngineRequest(context, "r-0", (1, 2), 8, Sampling())


def delta(*ids: int, at_s: float = 0.0, reason: Any = None) -> EngineDelta:
    now_s = time.time()
    times = EngineTimes(now_s - 4, now_s - 3, now_s - 2, now_s - 1 + at_s)
    return EngineDelta(ids, reason, times=times)


def spans(receiver: Receiver, tracing: Tracing) -> dict[str, ReceivedSpan]:
    tracing.shutdown()
    return {one.name: one for one in receiver.spans()}


async def test_a_whole_request_has_a_span_for_each_phase(receiver: Receiver, tracing: Tracing) -> None:
    service = EngineService(ScriptedEngine(delta(1), EngineDelta((2,)), delta(3, reason="stop")), tracing)
    assert [one.token_ids for one in await collected(service, request())] == [(1,), (2,), (3,)]
    assert service.in_flight == 0
    found = await asyncio.to_thread(spans, receiver, tracing)
    assert list(found) == ["engine.queue", "prefill", "decode"]
    assert {one.parent_id for one in found.values()} == {PARENT}
    assert {one.attributes["tokenline.engine_request_id"] for one in found.values()} == {"r-0"}
    assert found["engine.queue"].end_s == found["prefill"].start_s
    assert found["decode"].attributes["tokenline.tokens"] == 3
    assert found["decode"].attributes["tokenline.cancelled"] is False


async def test_a_reader_that_stops_is_no_error(receiver: Receiver, tracing: Tracing) -> None:
    service = EngineService(ScriptedEngine(delta(1), None), tracing)
    async with aclosing(stream_of(service, request())) as deltas:
        await anext(deltas)
        assert service.in_flight == 1
    assert service.in_flight == 0
    decode = (await asyncio.to_thread(spans, receiver, tracing))["decode"]
    assert decode.attributes["tokenline.cancelled"] is True
    assert "error.type" not in decode.attributes
    assert decode.status == "unset"


async def test_the_phase_in_which_the_engine_died_has_the_error(receiver: Receiver, tracing: Tracing) -> None:
    service = EngineService(ScriptedEngine(delta(1), EngineDied("dead")), tracing)
    with pytest.raises(EngineDied):
        await collected(service, request())
    found = await asyncio.to_thread(spans, receiver, tracing)
    assert (found["decode"].status, found["decode"].attributes["error.type"]) == ("error", "engine_died")
    assert {found[name].status for name in ("engine.queue", "prefill")} == {"unset"}


async def test_a_request_that_was_never_scheduled_waited_to_its_deadline(receiver: Receiver, tracing: Tracing) -> None:
    service = EngineService(ScriptedEngine(None), tracing)
    with pytest.raises(DeadlineExceeded):
        await collected(service, request(remaining_s=0.05))
    (queue,) = (await asyncio.to_thread(spans, receiver, tracing)).values()
    assert (queue.name, queue.status, queue.attributes["error.type"]) == ("engine.queue", "error", "deadline_exceeded")


async def test_what_is_not_of_the_tree_is_an_internal_error(receiver: Receiver, tracing: Tracing) -> None:
    with pytest.raises(RuntimeError):
        await collected(EngineService(ScriptedEngine(RuntimeError("of the user's words")), tracing), request())
    (queue,) = (await asyncio.to_thread(spans, receiver, tracing)).values()
    assert queue.attributes["error.type"] == "internal_error"
    assert "words" not in repr(queue)


async def test_an_unsampled_request_has_no_span(receiver: Receiver, tracing: Tracing) -> None:
    await collected(EngineService(ScriptedEngine(delta(1, reason="stop")), tracing), request(flags="00"))
    assert await asyncio.to_thread(spans, receiver, tracing) == {}


async def test_a_request_that_a_stop_string_ended_was_decoding_until_its_last_delta(
    receiver: Receiver, tracing: Tracing
) -> None:
    # Both engines give their times with the first delta, whose last token is its first.
    first = EngineDelta((1,), times=EngineTimes(time.time() - 4, time.time() - 3, time.time() - 2, time.time() - 2))
    service = EngineService(ScriptedEngine(first, EngineDelta((2,)), None), tracing)
    async with aclosing(stream_of(service, request())) as deltas:
        await anext(deltas)
        await anext(deltas)
    decode = (await asyncio.to_thread(spans, receiver, tracing))["decode"]
    assert decode.end_s - decode.start_s >= 1.9
    assert decode.attributes["tokenline.cancelled"] is True


async def test_an_engine_that_stalls_was_decoding_until_the_deadline(receiver: Receiver, tracing: Tracing) -> None:
    first = EngineDelta((1,), times=EngineTimes(time.time() - 4, time.time() - 3, time.time() - 2, time.time() - 2))
    asked = request(remaining_s=0.05)
    with pytest.raises(DeadlineExceeded):
        await collected(EngineService(ScriptedEngine(first, None), tracing), asked)
    decode = (await asyncio.to_thread(spans, receiver, tracing))["decode"]
    assert decode.end_s >= asked.context.deadline_s - 0.001  # nanoseconds are counted from a float
    assert (decode.status, decode.attributes["error.type"]) == ("error", "deadline_exceeded")
    assert decode.attributes["tokenline.tokens"] == 1


async def test_a_reader_that_stops_after_the_last_delta_cancelled_nothing(receiver: Receiver, tracing: Tracing) -> None:
    service = EngineService(ScriptedEngine(delta(1, reason="length"), None), tracing)
    async with aclosing(stream_of(service, request())) as deltas:
        await anext(deltas)
    decode = (await asyncio.to_thread(spans, receiver, tracing))["decode"]
    assert decode.attributes["tokenline.cancelled"] is False


async def test_a_request_whose_task_is_cancelled_leaves_nothing_in_flight(receiver: Receiver, tracing: Tracing) -> None:
    service = EngineService(ScriptedEngine(None), tracing)
    asking = asyncio.create_task(collected(service, request()))
    await asyncio.sleep(0)
    assert service.in_flight == 1
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert service.in_flight == 0
    (queue,) = (await asyncio.to_thread(spans, receiver, tracing)).values()
    assert (queue.name, queue.status, queue.attributes["tokenline.cancelled"]) == ("engine.queue", "unset", True)


async def test_several_requests_are_counted_while_they_last(tracing: Tracing) -> None:
    service = EngineService(ScriptedEngine(delta(1), None), tracing)
    first, second = stream_of(service, request()), stream_of(service, request())
    await anext(first)
    await anext(second)
    assert service.in_flight == 2
    await first.aclose()
    assert service.in_flight == 1
    await second.aclose()
    assert service.in_flight == 0


async def test_what_a_client_got_wrong_is_no_failure_of_the_engine(receiver: Receiver, tracing: Tracing) -> None:
    wrong = InvalidRequest("stop: 'the user's words' is too long", "stop")
    with pytest.raises(InvalidRequest):
        await collected(EngineService(ScriptedEngine(wrong), tracing), request())
    (queue,) = (await asyncio.to_thread(spans, receiver, tracing)).values()
    assert (queue.status, queue.attributes["error.type"]) == ("unset", "invalid_value")
    assert "words" not in repr(queue)


async def test_the_load_is_the_engines() -> None:
    service = EngineService(ScriptedEngine(), start(TracingSection(), "engine", "engine-0", "m"))
    assert await service.load() == LoadReport(0, 0, 0.0, 1)
