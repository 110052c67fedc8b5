"""A stream across a hop, over the token channel and as Ray Serve's own: the same to who asks, however it ends."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from streams import collected

from deployments import streams
from deployments.handles import ENGINE_DELTAS, GENERATED, EngineHandle, PostprocessHandle
from deployments.streams import Answering, uses_channel
from serve_app.aio import Enough, Sink
from serve_app.config import ChannelSection
from serve_app.errors import BacklogFull, ChannelLost, EngineDied, HopUnavailable, InvalidRequest
from serve_app.messages import (
    Closing,
    EngineDelta,
    EngineRequest,
    GenerateSummary,
    RequestContext,
    Sampling,
    TokenLogprob,
)

BOTH_WAYS = pytest.mark.parametrize("enabled", [True, False], ids=["channel", "ray"])
SOON_S = 5.0


class Engine:
    """The callee's work. Plays a script: deltas are pushed, an exception is raised, None waits for ever."""

    def __init__(self, *script: Any) -> None:
        self._script = script
        self.pushed = asyncio.Event()
        self.ended = asyncio.Event()
        self.cancelled = False

    async def generate(self, request: EngineRequest, sink: Sink[Any]) -> None:
        try:
            for step in self._script:
                await asyncio.sleep(0)
                if step is None:
                    await asyncio.Event().wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    sink(step)
                    self.pushed.set()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        finally:
            self.ended.set()


def wrapped(error: Exception) -> Exception:
    """As Ray does it."""
    wrapped: Exception = RayTaskError("generate", "traceback", error).as_instanceof_cause()
    return wrapped


class Call:
    """A Serve response: what the replica does for it runs at once, and Ray wraps what that raises."""

    def __init__(self, work: Awaitable[Any]) -> None:
        self.task = asyncio.ensure_future(work)

    def cancel(self) -> None:
        self.task.cancel()

    def __await__(self) -> Any:
        return self._result().__await__()

    async def _result(self) -> Any:
        try:
            return await asyncio.shield(self.task)
        except ActorDiedError:
            raise
        except Exception as error:
            raise wrapped(error) from error


class StreamedCall:
    """As `Call`, of a streaming method."""

    def __init__(self, items: AsyncGenerator[Any, None]) -> None:
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()
        self.task = asyncio.ensure_future(self._pump(items))

    def cancel(self) -> None:
        self.task.cancel()

    async def _pump(self, items: AsyncGenerator[Any, None]) -> None:
        try:
            async with aclosing(items):
                async for item in items:
                    self._arrived.put_nowait((item, None))
            self._arrived.put_nowait((None, StopAsyncIteration()))
        except Exception as error:  # noqa: BLE001 - raised where the items are read
            self._arrived.put_nowait((None, wrapped(error)))

    def __aiter__(self) -> "StreamedCall":
        return self

    async def __anext__(self) -> Any:
        item, error = await self._arrived.get()
        if error is not None:
            raise error
        return item


class Method:
    def __init__(self, remote: Callable[..., Any]) -> None:
        self.remote = remote


class Replica:
    """A Serve handle of one replica in this process."""

    def __init__(self, work: Any, codec: Any = ENGINE_DELTAS) -> None:
        self.answering: Answering[Any, Any] = Answering(work.generate, codec, ChannelSection())
        self.calls: list[Any] = []
        self.generate = Method(lambda request, route: self._called(Call(self.answering.generate(request, route))))
        self.stream = Method(lambda request: self._called(StreamedCall(self.answering.stream(request))))
        self.report = Method(lambda: None)

    def options(self, **_: Any) -> "Replica":
        return self

    def _called(self, call: Any) -> Any:
        self.calls.append(call)
        return call


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.delenv("RAY_USE_TLS", raising=False)


def delta(number: int, reason: Any = None) -> EngineDelta:
    return EngineDelta((number,), reason, logprobs=(TokenLogprob(number, -1.5, ((number, -1.5), (0, -2.0))),))


def request() -> EngineRequest:
    return EngineRequest(RequestContext("id", 0.0), "id", (1,), 1, Sampling())


WHOLE = [*(delta(number) for number in range(50)), delta(50, "stop")]


@BOTH_WAYS
async def test_all_items_come_in_order_and_as_they_were_sent(enabled: bool) -> None:
    engine = Engine(*WHOLE)
    handle = EngineHandle(replica := Replica(engine), ChannelSection(enabled=enabled))
    for _ in range(3):
        assert await collected(handle, request()) == WHOLE
    assert not engine.cancelled
    assert all(call.task.done() and not call.task.cancelled() for call in replica.calls)
    await ended(handle, replica)


@BOTH_WAYS
async def test_bytes_and_what_was_measured_cross_the_other_hop(enabled: bool) -> None:
    closing = Closing(b"data: [DONE]\n\n", GenerateSummary((), (), 1, 2, 3))
    items = [b"data: \xff\n\n", b"", closing]
    handle = PostprocessHandle(replica := Replica(Engine(*items), GENERATED), ChannelSection(enabled=enabled))
    assert await collected(handle, request()) == items
    await ended(handle, replica)


@BOTH_WAYS
@pytest.mark.parametrize("items", [0, 1, 20])
async def test_an_error_of_the_callee_comes_as_it_is_after_the_items_before_it(enabled: bool, items: int) -> None:
    engine = Engine(*WHOLE[:items], InvalidRequest("no", "top_k"))
    handle, got = EngineHandle(replica := Replica(engine), ChannelSection(enabled=enabled)), list[Any]()
    with pytest.raises(InvalidRequest) as raised:
        await handle.generate(request(), got.append)
    assert type(raised.value) is InvalidRequest
    assert (raised.value.message, raised.value.param) == ("no", "top_k")
    assert got == WHOLE[:items]
    await ended(handle, replica)


@BOTH_WAYS
async def test_a_sink_that_has_enough_ends_the_callee_and_is_no_error_of_the_hop(enabled: bool) -> None:
    engine = Engine(*WHOLE[:3], None)
    handle, got = EngineHandle(replica := Replica(engine), ChannelSection(enabled=enabled)), list[Any]()

    def sink(item: EngineDelta) -> None:
        got.append(item)
        if len(got) == 3:
            raise Enough

    with pytest.raises(Enough):
        await handle.generate(request(), sink)
    await asyncio.wait_for(engine.ended.wait(), SOON_S)
    assert engine.cancelled
    assert got == WHOLE[:3]
    await ended(handle, replica)


@BOTH_WAYS
async def test_a_sink_that_fails_ends_the_callee_with_its_own_error(enabled: bool) -> None:
    engine = Engine(*WHOLE[:3], None)
    handle = EngineHandle(replica := Replica(engine), ChannelSection(enabled=enabled))
    error = BacklogFull("not read")

    def sink(item: EngineDelta) -> None:
        raise error

    with pytest.raises(BacklogFull) as raised:
        await handle.generate(request(), sink)
    assert raised.value is error
    await asyncio.wait_for(engine.ended.wait(), SOON_S)
    assert engine.cancelled
    await ended(handle, replica)


@BOTH_WAYS
async def test_a_caller_that_is_cancelled_ends_the_callee(enabled: bool) -> None:
    engine = Engine(delta(1), None)
    handle = EngineHandle(replica := Replica(engine), ChannelSection(enabled=enabled))
    arrived = asyncio.Event()
    asking = asyncio.create_task(handle.generate(request(), lambda _: arrived.set()))
    await asyncio.wait_for(arrived.wait(), SOON_S)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.wait_for(engine.ended.wait(), SOON_S)
    assert engine.cancelled
    await ended(handle, replica)


@BOTH_WAYS
async def test_requests_at_the_same_time_get_their_own_items(enabled: bool) -> None:
    class Echo:
        async def generate(self, request: EngineRequest, sink: Sink[EngineDelta]) -> None:
            for _ in range(30):
                sink(EngineDelta(request.prompt_ids))
                await asyncio.sleep(0)

    handle = EngineHandle(replica := Replica(Echo()), ChannelSection(enabled=enabled))
    asked = [EngineRequest(RequestContext("id", 0.0), "id", (number,), 1, Sampling()) for number in range(40)]
    answers = await asyncio.gather(*(collected(handle, one) for one in asked))
    assert answers == [[EngineDelta((number,))] * 30 for number in range(40)]
    await ended(handle, replica)


async def test_a_replica_that_is_lost_amid_a_stream_is_a_dead_engine_and_another_hops_is_unavailable() -> None:
    for kind, codec, item, error in (
        (EngineHandle, ENGINE_DELTAS, delta(1), EngineDied),
        (PostprocessHandle, GENERATED, b"x", HopUnavailable),
    ):
        replica = Replica(engine := Engine(item, ActorDiedError()), codec)
        handle, got = kind(replica, ChannelSection()), list[Any]()
        with pytest.raises(error, match="was lost"):
            await handle.generate(request(), got.append)
        assert engine.ended.is_set()
        await ended(handle, replica)


async def test_a_stream_that_is_open_when_its_reader_stops_ends_and_so_does_its_work() -> None:
    engine = Engine(b"x", None)
    handle = PostprocessHandle(replica := Replica(engine, GENERATED), ChannelSection())
    arrived = asyncio.Event()
    asking = asyncio.create_task(handle.generate(request(), lambda _: arrived.set()))
    await asyncio.wait_for(arrived.wait(), SOON_S)
    handle.stop()
    with pytest.raises(HopUnavailable):
        await asyncio.wait_for(asking, SOON_S)
    await asyncio.wait_for(engine.ended.wait(), SOON_S)
    assert engine.cancelled
    await ended(handle, replica)


@pytest.mark.parametrize(
    ("value", "uses"), [(None, True), ("0", True), ("", True), ("1", False), ("true", False), ("TRUE", False)]
)
def test_where_rays_connections_are_encrypted_no_stream_goes_in_the_clear(
    monkeypatch: pytest.MonkeyPatch, value: str | None, uses: bool
) -> None:
    if value is not None:
        monkeypatch.setenv("RAY_USE_TLS", value)
    assert uses_channel(ChannelSection()) == uses
    assert not uses_channel(ChannelSection(enabled=False))


async def test_with_encryption_the_stream_is_rays_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    handle = EngineHandle(replica := Replica(Engine(*WHOLE)), ChannelSection())
    assert await collected(handle, request()) == WHOLE
    assert [type(call) for call in replica.calls] == [StreamedCall]
    await ended(handle, replica)


async def test_over_rays_own_stream_a_reader_that_lags_ends_the_work() -> None:
    class Fast:
        async def generate(self, request: EngineRequest, sink: Sink[int]) -> None:
            for number in range(1000):
                sink(number)

    answering: Answering[Any, int] = Answering(Fast().generate, ENGINE_DELTAS, ChannelSection(max_backlog_items=16))
    stream = answering.stream(request())
    assert [await anext(stream) for _ in range(16)] == list(range(16))
    with pytest.raises(BacklogFull):
        await anext(stream)


async def test_a_replica_that_cannot_reach_who_asks_is_as_good_as_lost() -> None:
    unreachable = Engine(ChannelLost("no connection to 10.0.0.7"))
    for kind, codec, error in (
        (EngineHandle, ENGINE_DELTAS, EngineDied),
        (PostprocessHandle, GENERATED, HopUnavailable),
    ):
        handle = kind(replica := Replica(unreachable, codec), ChannelSection())
        with pytest.raises(error) as raised:
            await collected(handle, request())
        assert "10.0.0.7" not in raised.value.message
        await ended(handle, replica)


async def test_of_what_is_not_of_the_tree_the_callers_sink_and_the_callee_are_told_apart() -> None:
    """Only what Ray has carried here is Ray's: a sink's own error is not the hop's."""
    for enabled in (True, False):
        handle = EngineHandle(replica := Replica(Engine(KeyError("there"))), ChannelSection(enabled=enabled))
        with pytest.raises(RayTaskError):
            await collected(handle, request())
        await ended(handle, replica)

        def sink(item: EngineDelta) -> None:
            raise KeyError("here")

        handle = EngineHandle(replica := Replica(Engine(delta(1), None)), ChannelSection(enabled=enabled))
        with pytest.raises(KeyError, match="here"):
            await handle.generate(request(), sink)
        await ended(handle, replica)


async def ended(handle: Any, replica: Replica) -> None:
    """Stops both ends; nothing may be left at work."""
    handle.stop()
    await asyncio.wait_for(replica.answering.stop(), SOON_S)
    await asyncio.wait_for(asyncio.gather(*(call.task for call in replica.calls), return_exceptions=True), SOON_S)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=SOON_S)
    assert asyncio.all_tasks() == {asyncio.current_task()}
