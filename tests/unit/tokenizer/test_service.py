"""Tokenization in threads: a slow item fails alone and holds its place until its thread has really ended."""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from serve_app.config import TracingSection
from serve_app.errors import DeadlineExceeded, InvalidRequest
from serve_app.messages import Detokenized, RequestContext, Tokenized, TokenizeRequest
from serve_app.telemetry.names import TOKENIZER_QUEUE
from serve_app.telemetry.tracing import start
from serve_app.tokenizer.service import TokenizerService

LIMIT_S = 60.0
UNTRACED = start(TracingSection(), "tokenizer", "test", "m")
TOKENIZED = Tokenized(prompt_ids=((1,),), max_tokens=(0,), context_tokens=8, vocabulary_size=8)


def unmeasured(tokenized: Tokenized) -> Tokenized:
    return msgspec.structs.replace(tokenized, stages=())


class BlockingEncoder:
    """An encoder whose items named `slow…` block a thread until `release`; it records who runs."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.started: list[str] = []
        self.has_started: dict[str, threading.Event] = defaultdict(threading.Event)
        self.threads: set[str] = set()
        self.running = 0
        self.most_running = 0
        self._lock = threading.Lock()

    def encode(self, request: TokenizeRequest) -> Tokenized:
        name = request.context.request_id
        with self._lock:
            self.started.append(name)
            self.threads.add(threading.current_thread().name)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            self.has_started[name].set()
        try:
            if name.startswith("slow"):
                self.release.wait(30)
            if name.endswith("wrong"):
                raise InvalidRequest("prompt: wrong", "prompt")
            return TOKENIZED
        finally:
            with self._lock:
                self.running -= 1

    def decode(self, ids: tuple[int, ...]) -> Detokenized:
        if 99 in ids:
            raise InvalidRequest("tokens: 99", "tokens")
        return Detokenized(f"text of {ids}")


@pytest.fixture
def encoder() -> Iterator[BlockingEncoder]:
    blocking = BlockingEncoder()
    yield blocking
    blocking.release.set()


class Clock:
    """The loop's clock and the wall clock, both ahead of the real ones by what the test has let pass."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        loop = asyncio.get_running_loop()
        real = loop.time
        loop.time = lambda: real() + self._ahead_s  # type: ignore[method-assign]

    def wall_s(self) -> float:
        return time.time() + self._ahead_s

    async def passes(self, seconds: float) -> None:
        self._ahead_s += seconds
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("serve_app.messages.time", SimpleNamespace(time=clock.wall_s))
    return clock


def service(encoder: Any, threads: int = 2) -> TokenizerService:
    return TokenizerService(encoder, threads, LIMIT_S, UNTRACED)


async def has_started(encoder: BlockingEncoder, *names: str) -> None:
    for name in names:
        assert await asyncio.to_thread(encoder.has_started[name].wait, 30)


def item(name: str, deadline_at_s: float | None = None) -> TokenizeRequest:
    context = RequestContext(name, time.time() + 3600 if deadline_at_s is None else deadline_at_s)
    return TokenizeRequest(context=context, prompts=("x",))


async def test_an_item_runs_in_a_thread_and_gives_its_result(encoder: BlockingEncoder) -> None:
    assert unmeasured(await service(encoder).tokenize(item("quick"))) == TOKENIZED
    assert all(name.startswith("tokenizer") for name in encoder.threads)
    detokenized = await service(encoder).detokenize(RequestContext("d", time.time() + 600), (1, 2))
    assert detokenized.text == "text of (1, 2)"


async def test_a_slow_item_times_out_alone_while_others_go_on(encoder: BlockingEncoder, clock: Clock) -> None:
    tokenizer = service(encoder)
    slow = asyncio.create_task(tokenizer.tokenize(item("slow")))
    await has_started(encoder, "slow")
    for number in range(20):
        assert unmeasured(await tokenizer.tokenize(item(f"quick-{number}"))) == TOKENIZED
    await clock.passes(LIMIT_S - 1)
    assert not slow.done()
    await clock.passes(2)
    with pytest.raises(DeadlineExceeded, match=r"limit of 60\.0 s"):
        await slow
    assert unmeasured(await tokenizer.tokenize(item("after"))) == TOKENIZED
    assert encoder.running == 1


async def test_the_place_of_a_timed_out_item_is_given_back_only_when_its_thread_has_ended(
    encoder: BlockingEncoder, clock: Clock
) -> None:
    tokenizer = service(encoder, threads=1)
    slow = asyncio.create_task(tokenizer.tokenize(item("slow")))
    await has_started(encoder, "slow")
    await clock.passes(LIMIT_S + 1)
    with pytest.raises(DeadlineExceeded):
        await slow
    waits, in_vain = (
        asyncio.create_task(tokenizer.tokenize(item("waits"))),
        asyncio.create_task(tokenizer.tokenize(item("waits in vain", deadline_at_s=clock.wall_s() + 5))),
    )
    await clock.passes(6)
    with pytest.raises(DeadlineExceeded, match="while it waited"):
        await in_vain
    # Had it been given the place of the slow one, its own limit would have run out behind the busy thread.
    await clock.passes(LIMIT_S + 1)
    assert not waits.done()
    assert encoder.started == ["slow"]
    encoder.release.set()
    assert unmeasured(await waits) == TOKENIZED
    assert encoder.started == ["slow", "waits"]


async def test_no_more_items_run_at_once_than_there_are_threads(encoder: BlockingEncoder) -> None:
    tokenizer = service(encoder, threads=3)
    tasks = [asyncio.create_task(tokenizer.tokenize(item(f"slow-{number}"))) for number in range(12)]
    await has_started(encoder, "slow-0", "slow-1", "slow-2")
    assert len(encoder.started) == 3
    encoder.release.set()
    assert [unmeasured(one) for one in await asyncio.gather(*tasks)] == [TOKENIZED] * 12
    assert encoder.most_running <= 3


async def test_items_start_in_the_order_in_which_they_came(encoder: BlockingEncoder) -> None:
    tokenizer = service(encoder, threads=1)
    tasks = [asyncio.create_task(tokenizer.tokenize(item(f"slow-{number}"))) for number in range(5)]
    await has_started(encoder, "slow-0")
    encoder.release.set()
    await asyncio.gather(*tasks)
    assert encoder.started == [f"slow-{number}" for number in range(5)]


async def test_the_limit_of_an_item_does_not_count_its_waiting(encoder: BlockingEncoder, clock: Clock) -> None:
    tokenizer = service(encoder, threads=1)
    first = asyncio.create_task(tokenizer.tokenize(item("slow")))
    second = asyncio.create_task(tokenizer.tokenize(item("quick")))
    await has_started(encoder, "slow")
    await clock.passes(3 * LIMIT_S)
    with pytest.raises(DeadlineExceeded):
        await first
    assert not second.done()
    encoder.release.set()
    assert unmeasured(await second) == TOKENIZED


async def test_the_requests_deadline_ends_an_item_before_the_items_own_limit(
    encoder: BlockingEncoder, clock: Clock
) -> None:
    slow = asyncio.create_task(service(encoder).tokenize(item("slow", deadline_at_s=clock.wall_s() + 5)))
    await has_started(encoder, "slow")
    await clock.passes(6)
    with pytest.raises(DeadlineExceeded):
        await slow
    assert encoder.running == 1


async def test_a_request_past_its_deadline_is_not_worked_on_and_is_not_told_of_a_negative_limit(
    encoder: BlockingEncoder,
) -> None:
    with pytest.raises(DeadlineExceeded) as refused:
        await service(encoder).tokenize(item("late", deadline_at_s=time.time() - 5))
    assert "-" not in refused.value.message
    assert encoder.started == []


async def test_an_error_of_an_item_reaches_its_caller_and_frees_the_place(encoder: BlockingEncoder) -> None:
    tokenizer = service(encoder, threads=1)
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="prompt: wrong"):
            await tokenizer.tokenize(item("wrong"))
        with pytest.raises(InvalidRequest, match="tokens: 99"):
            await tokenizer.detokenize(RequestContext("d", time.time() + 600), (99,))
    assert unmeasured(await tokenizer.tokenize(item("quick"))) == TOKENIZED


async def test_an_error_after_the_caller_has_left_frees_the_place_and_is_not_reported_as_lost(
    encoder: BlockingEncoder, clock: Clock
) -> None:
    reports: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
    tokenizer = service(encoder, threads=1)
    slow = asyncio.create_task(tokenizer.tokenize(item("slow and wrong")))
    await has_started(encoder, "slow and wrong")
    await clock.passes(LIMIT_S + 1)
    with pytest.raises(DeadlineExceeded):
        await slow
    encoder.release.set()
    assert unmeasured(await tokenizer.tokenize(item("quick"))) == TOKENIZED
    assert reports == []


async def test_a_cancelled_caller_leaves_at_once_and_its_place_is_freed_when_its_thread_ends(
    encoder: BlockingEncoder,
) -> None:
    tokenizer = service(encoder, threads=1)
    caller = asyncio.create_task(tokenizer.tokenize(item("slow")))
    await has_started(encoder, "slow")
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert encoder.running == 1
    encoder.release.set()
    assert unmeasured(await tokenizer.tokenize(item("quick"))) == TOKENIZED


async def test_a_caller_cancelled_while_it_waits_takes_no_place(encoder: BlockingEncoder) -> None:
    tokenizer = service(encoder, threads=1)
    first = asyncio.create_task(tokenizer.tokenize(item("slow")))
    waiting = asyncio.create_task(tokenizer.tokenize(item("never")))
    await has_started(encoder, "slow")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    encoder.release.set()
    assert unmeasured(await first) == TOKENIZED
    assert unmeasured(await tokenizer.tokenize(item("quick"))) == TOKENIZED
    assert "never" not in encoder.started


async def test_the_wait_for_a_thread_and_the_work_are_told_apart(encoder: BlockingEncoder) -> None:
    tokenizer = service(encoder, threads=1)
    first = asyncio.create_task(tokenizer.tokenize(item("slow")))
    await has_started(encoder, "slow")
    context = RequestContext("second", time.time() + 600, sent_s=time.time() - 100)
    second = asyncio.create_task(tokenizer.tokenize(TokenizeRequest(context=context, prompts=("x",))))
    for _ in range(10):
        await asyncio.sleep(0)
    assert (tokenizer.in_flight, tokenizer.queued) == (2, 1)
    encoder.release.set()
    await first
    (queue,) = (await second).stages
    assert queue.name == TOKENIZER_QUEUE
    assert queue.begin_s == context.sent_s
    assert queue.busy_s >= 100
    assert (tokenizer.in_flight, tokenizer.queued) == (0, 0)
