"""Merged and bounded streams: order, back-pressure, errors, and that nothing is left open."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.aio import merge, task_count, until
from serve_app.errors import DeadlineExceeded


class Source:
    """A stream that plays its script: a float is a pause in seconds, an exception is raised, the rest are items."""

    def __init__(self, *script: Any) -> None:
        self._script = script
        self.given = 0
        self.closed = False

    async def stream(self) -> AsyncGenerator[Any, None]:
        try:
            for step in self._script:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, BaseException):
                    raise step
                else:
                    self.given += 1
                    yield step
        finally:
            self.closed = True


async def read(stream: AsyncGenerator[Any, None], got: list[Any]) -> None:
    async with aclosing(stream):
        async for item in stream:
            got.append(item)


@pytest.fixture
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """`until` reads the loop's virtual clock as its wall clock."""
    monkeypatch.setattr("serve_app.aio.time", SimpleNamespace(time=lambda: asyncio.get_running_loop().time()))


def test_merge_gives_the_items_of_all_streams_in_the_order_in_which_they_come(run_virtual: Any) -> None:
    async def main() -> list[str]:
        slow, fast = Source(2.0, "s1", 2.0, "s2"), Source(1.0, "f1", 2.0, "f2")
        return [item async for item in merge([slow.stream(), fast.stream()])]

    assert run_virtual(main()) == ["f1", "s1", "f2", "s2"]


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_merge_ends_when_the_last_stream_has_ended_and_loses_nothing(count: int, run_virtual: Any) -> None:
    async def main() -> list[Any]:
        sources = [Source(*((index, step) for step in range(20))) for index in range(count)]
        items = [item async for item in merge([source.stream() for source in sources])]
        assert all(source.closed for source in sources)
        return items

    items = run_virtual(main())
    assert sorted(items) == [(index, step) for index in range(count) for step in range(20)]
    for index in range(count):
        assert [step for number, step in items if number == index] == list(range(20))


def test_merge_passes_none_on_as_an_item_like_any_other(run_virtual: Any) -> None:
    async def main() -> list[Any]:
        return [item async for item in merge([Source(None).stream(), Source(None).stream()])]

    assert run_virtual(main()) == [None, None]


def test_merge_raises_the_first_error_after_the_items_before_it_and_closes_the_others(run_virtual: Any) -> None:
    async def main() -> None:
        failing, endless = Source(1.0, "a", 1.0, ValueError("first")), Source(*["b", 0.9] * 50)
        got: list[str] = []
        with pytest.raises(ValueError, match="first"):
            await read(merge([failing.stream(), endless.stream()]), got)
        assert "a" in got
        assert got.count("b") == 3
        assert failing.closed
        assert endless.closed
        assert asyncio.get_running_loop().time() == pytest.approx(2.0)

    run_virtual(main())


@pytest.mark.parametrize("count", [1, 3])
def test_leaving_the_loop_closes_every_merged_stream(count: int, run_virtual: Any) -> None:
    async def main() -> None:
        sources = [Source("now", 3600.0, "never") for _ in range(count)]
        async with aclosing(merge([source.stream() for source in sources])) as merged:
            for _ in range(count):
                await anext(merged)
        assert all(source.closed for source in sources)
        assert asyncio.get_running_loop().time() < 1
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


@pytest.mark.parametrize("count", [1, 3])
def test_cancelling_the_consumer_closes_every_merged_stream(count: int, run_virtual: Any) -> None:
    async def main() -> None:
        sources = [Source("now", 3600.0, "never") for _ in range(count)]
        seen = asyncio.Event()

        async def consume() -> None:
            async with aclosing(merge([source.stream() for source in sources])) as merged:
                async for _ in merged:
                    if all(source.given for source in sources):
                        seen.set()

        consumer = asyncio.create_task(consume())
        await seen.wait()
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        assert all(source.closed for source in sources)
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_consumer_that_stands_still_holds_the_merged_streams_back(count: int, run_virtual: Any) -> None:
    async def main() -> None:
        sources = [Source(*range(1000)) for _ in range(count)]
        async with aclosing(merge([source.stream() for source in sources])) as merged:
            await anext(merged)
            await asyncio.sleep(60)
            # One item per place in the queue, one in the hands of each stream, and the one that was taken.
            assert sum(source.given for source in sources) <= 2 * count + 1

    run_virtual(main())


def test_a_merged_stream_that_is_cancelled_from_within_does_not_leave_the_consumer_waiting(run_virtual: Any) -> None:
    async def main() -> None:
        cancelled, steady = Source(asyncio.CancelledError("from below")), Source("a")
        with pytest.raises(asyncio.CancelledError):
            await read(merge([cancelled.stream(), steady.stream()]), [])

    run_virtual(main())


@pytest.mark.usefixtures("wall_clock")
def test_until_passes_every_item_of_a_stream_that_is_on_time(run_virtual: Any) -> None:
    async def main() -> list[str]:
        source = Source("a", 3.0, "b", 3.0, "c")
        items = [item async for item in until(10.0, source.stream())]
        assert source.closed
        return items

    assert run_virtual(main()) == ["a", "b", "c"]


@pytest.mark.usefixtures("wall_clock")
def test_until_raises_at_the_deadline_of_the_whole_stream_and_closes_it(run_virtual: Any) -> None:
    async def main() -> list[str]:
        source = Source(*["tick", 3.0] * 10)
        got: list[str] = []
        with pytest.raises(DeadlineExceeded):
            await read(until(10.0, source.stream()), got)
        assert asyncio.get_running_loop().time() == pytest.approx(10.0)
        assert source.closed
        return got

    assert run_virtual(main()) == ["tick"] * 4


@pytest.mark.usefixtures("wall_clock")
def test_until_with_a_deadline_in_the_past_does_not_wait(run_virtual: Any) -> None:
    async def main() -> None:
        source = Source(5.0, "late")
        with pytest.raises(DeadlineExceeded):
            async with aclosing(until(-1.0, source.stream())) as bounded:
                await anext(bounded)
        assert asyncio.get_running_loop().time() < 1
        assert source.closed
        assert source.given == 0

    run_virtual(main())


@pytest.mark.usefixtures("wall_clock")
def test_until_counts_the_time_that_its_consumer_takes(run_virtual: Any) -> None:
    async def main() -> None:
        source = Source("a", 1.0, "b")
        async with aclosing(until(10.0, source.stream())) as bounded:
            assert await anext(bounded) == "a"
            await asyncio.sleep(20)
            with pytest.raises(DeadlineExceeded):
                await anext(bounded)
        assert source.closed

    run_virtual(main())


@pytest.mark.usefixtures("wall_clock")
def test_leaving_the_loop_closes_the_bounded_stream(run_virtual: Any) -> None:
    async def main() -> None:
        source = Source("a", 1.0, "b")
        async with aclosing(until(10.0, source.stream())) as bounded:
            assert await anext(bounded) == "a"
        assert source.closed
        assert asyncio.get_running_loop().time() == 0

    run_virtual(main())


@pytest.mark.usefixtures("wall_clock")
def test_an_error_of_the_stream_passes_through_until_unchanged(run_virtual: Any) -> None:
    async def main() -> None:
        source = Source("a", ValueError("of the stream"))
        with pytest.raises(ValueError, match="of the stream"):
            async for _ in until(10.0, source.stream()):
                pass
        assert source.closed

    run_virtual(main())


@pytest.mark.usefixtures("wall_clock")
def test_a_timeout_inside_the_stream_is_not_taken_for_the_deadline(run_virtual: Any) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError, match="of a socket"):
            async for _ in until(10.0, Source(TimeoutError("of a socket")).stream()):
                pass

    run_virtual(main())


def test_the_tasks_of_the_running_loop_are_counted(run_virtual: Any) -> None:
    async def main() -> None:
        before = task_count()
        task = asyncio.create_task(asyncio.sleep(1))
        assert task_count() == before + 1
        await task
        assert task_count() == before

    run_virtual(main())
