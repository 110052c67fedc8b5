"""Pushed streams that are pulled, work done together, and deadlines: order, bounds, errors, and nothing left open."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from streams import push

from serve_app.aio import Enough, Sink, pulled, task_count, together, within
from serve_app.errors import BacklogFull, DeadlineExceeded


class Source:
    """Work that plays its script: a float is a pause in seconds, an exception is raised, the rest are pushed."""

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

    async def push(self, sink: Sink[Any]) -> None:
        await push(self.stream(), sink)


async def read(source: Source, got: list[Any], max_items: int = 1000) -> None:
    async with aclosing(pulled(source.push, max_items)) as batches:
        async for batch in batches:
            got += batch


@pytest.fixture
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """`within` reads the loop's virtual clock as its wall clock."""
    monkeypatch.setattr("serve_app.aio.time", SimpleNamespace(time=lambda: asyncio.get_running_loop().time()))


def test_a_pushed_stream_is_pulled_in_order_and_whole(run_virtual: Any) -> None:
    async def main() -> list[Any]:
        source, got = Source("a", 1.0, "b", None, 1.0, "c"), list[Any]()
        await read(source, got)
        assert source.closed
        return got

    assert run_virtual(main()) == ["a", "b", None, "c"]


def test_what_came_while_the_reader_was_busy_is_its_next_batch(run_virtual: Any) -> None:
    async def main() -> list[list[Any]]:
        batches = []
        async with aclosing(pulled(Source("a", 1.0, "b", 1.0, "c", 5.0, "d").push, 10)) as stream:
            async for batch in stream:
                batches.append(batch)
                await asyncio.sleep(3)
        return batches

    assert run_virtual(main()) == [["a"], ["b", "c"], ["d"]]


def test_the_first_item_does_not_wait_for_the_second(run_virtual: Any) -> None:
    async def main() -> None:
        async with aclosing(pulled(Source("a", 3600.0, "b").push, 10)) as stream:
            assert await anext(stream) == ["a"]
            assert asyncio.get_running_loop().time() == 0

    run_virtual(main())


def test_an_error_comes_after_the_items_before_it(run_virtual: Any) -> None:
    async def main() -> None:
        got: list[Any] = []
        with pytest.raises(ValueError, match="of the work"):
            await read(Source("a", "b", ValueError("of the work")), got)
        assert got == ["a", "b"]

    run_virtual(main())


@pytest.mark.parametrize("max_items", [1, 3])
def test_a_reader_that_stands_still_ends_the_work_at_the_limit_and_is_told_so(run_virtual: Any, max_items: int) -> None:
    async def main() -> None:
        source = Source(*["x", 1.0] * 100)
        got: list[Any] = []

        async def read_slowly() -> None:
            async with aclosing(pulled(source.push, max_items)) as stream:
                async for batch in stream:
                    got.extend(batch)
                    await asyncio.sleep(60)

        with pytest.raises(BacklogFull, match="max_backlog_items"):
            await read_slowly()
        assert got == ["x"] * (1 + max_items)
        assert source.closed
        assert source.given == max_items + 2

    run_virtual(main())


def test_leaving_the_loop_cancels_the_work_and_waits_for_its_end(run_virtual: Any) -> None:
    async def main() -> None:
        source = Source("now", 3600.0, "never")
        async with aclosing(pulled(source.push, 10)) as stream:
            await anext(stream)
            assert not source.closed
        assert source.closed
        assert asyncio.get_running_loop().time() < 1
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


def test_a_reader_that_leaves_waits_for_work_that_takes_its_time_to_end(run_virtual: Any) -> None:
    async def main() -> None:
        ended_s: list[float] = []

        async def work(sink: Sink[str]) -> None:
            sink("now")
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(5)
                ended_s.append(asyncio.get_running_loop().time())

        async with aclosing(pulled(work, 10)) as stream:
            await anext(stream)
        assert ended_s == [5]

    run_virtual(main())


def test_cancelling_the_reader_cancels_the_work(run_virtual: Any) -> None:
    async def main() -> None:
        source, got = Source("now", 3600.0, "never"), list[Any]()
        reader = asyncio.create_task(read(source, got))
        await asyncio.sleep(1)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert got == ["now"]
        assert source.closed
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


@pytest.mark.parametrize("before", [[], ["a"]])
def test_work_that_has_enough_before_the_reader_has_is_an_error_like_any_other(
    run_virtual: Any, before: list[str]
) -> None:
    async def main() -> None:
        got: list[Any] = []
        with pytest.raises(Enough):
            await read(Source(*before, Enough()), got)
        assert got == before

    run_virtual(main())


def test_work_that_is_cancelled_from_within_is_an_error_and_leaves_nobody_waiting(run_virtual: Any) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="cancelled from within"):
            await read(Source("a", asyncio.CancelledError("from below")), [])

    run_virtual(main())


@pytest.mark.parametrize("count", [0, 1, 5])
def test_together_does_everything_at_once(run_virtual: Any, count: int) -> None:
    async def main() -> None:
        done: list[int] = []

        async def one(number: int) -> None:
            await asyncio.sleep(1)
            done.append(number)

        await together([one(number) for number in range(count)])
        assert sorted(done) == list(range(count))
        assert asyncio.get_running_loop().time() == pytest.approx(min(count, 1))

    run_virtual(main())


@pytest.mark.parametrize("others", [0, 2])
def test_the_first_error_of_work_done_together_ends_the_others_and_is_raised_as_it_is(
    run_virtual: Any, others: int
) -> None:
    async def main() -> None:
        sources = [Source(3600.0, "never") for _ in range(others)]
        failing = Source(1.0, ValueError("first"))
        with pytest.raises(ValueError, match="first"):
            await together([source.push(print) for source in (*sources, failing)])
        assert all(source.closed for source in sources)
        assert asyncio.get_running_loop().time() == pytest.approx(1)

    run_virtual(main())


@pytest.mark.parametrize("count", [1, 3])
def test_cancelling_work_done_together_cancels_all_of_it(run_virtual: Any, count: int) -> None:
    async def main() -> None:
        sources = [Source(3600.0, "never") for _ in range(count)]
        work = asyncio.create_task(together([source.push(print) for source in sources]))
        await asyncio.sleep(1)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert all(source.closed for source in sources)

    run_virtual(main())


def test_a_sink_that_has_enough_ends_the_work(run_virtual: Any) -> None:
    async def main() -> None:
        source, got = Source(*range(100)), list[int]()

        def sink(item: int) -> None:
            got.append(item)
            if len(got) == 3:
                raise Enough

        with pytest.raises(Enough):
            await source.push(sink)
        assert got == [0, 1, 2]
        assert source.closed

    run_virtual(main())


@pytest.mark.usefixtures("wall_clock")
def test_work_within_its_deadline_gives_its_result(run_virtual: Any) -> None:
    async def main() -> None:
        got: list[Any] = []
        await within(10.0, Source("a", 3.0, "b").push(got.append))
        assert got == ["a", "b"]

    run_virtual(main())


@pytest.mark.usefixtures("wall_clock")
@pytest.mark.parametrize("deadline_s", [10.0, -1.0])
def test_work_past_its_deadline_is_cancelled_then(run_virtual: Any, deadline_s: float) -> None:
    async def main() -> None:
        source, got = Source(*["tick", 3.0] * 10), list[Any]()
        with pytest.raises(DeadlineExceeded):
            await within(deadline_s, source.push(got.append))
        assert asyncio.get_running_loop().time() == pytest.approx(max(0.0, deadline_s))
        assert source.closed
        assert got == ["tick"] * (4 if deadline_s > 0 else 1)

    run_virtual(main())


@pytest.mark.usefixtures("wall_clock")
@pytest.mark.parametrize("error", [ValueError("of the work"), TimeoutError("of a socket")])
def test_an_error_of_the_work_itself_is_not_taken_for_the_deadline(run_virtual: Any, error: Exception) -> None:
    async def main() -> None:
        with pytest.raises(type(error), match=str(error)):
            await within(10.0, Source(error).push(print))

    run_virtual(main())


def test_the_tasks_of_the_running_loop_are_counted(run_virtual: Any) -> None:
    async def main() -> None:
        before = task_count()
        task = asyncio.create_task(asyncio.sleep(1))
        assert task_count() == before + 1
        await task
        assert task_count() == before

    run_virtual(main())
