"""Two real processes, one of which is killed or stands still."""

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from outlet import Endless
from wire import settled

from serve_app.aio import Sink
from serve_app.channel.frame import Codec
from serve_app.channel.reader import Reader
from serve_app.channel.route import Route
from serve_app.channel.writer import Writer
from serve_app.errors import BacklogFull, ChannelLost

CHILD = """
import asyncio, sys
from serve_app.channel.frame import Codec
from serve_app.channel.reader import Reader
from serve_app.channel.route import Route
from serve_app.channel.writer import Writer

async def write(host, port, key, first):
    writer = Writer(Codec(bytes), 100)
    async def one(number):
        with writer.open(Route(host, int(port), bytes.fromhex(key), number)) as sender:
            sender.send(b"from the child")
            await asyncio.Event().wait()
    await asyncio.gather(*(one(number) for number in range(int(first), int(first) + 10)))

def said(subscription, ended):
    if ended.exception():
        return "lost"
    return f"{'whole' if ended.result() else 'failed'} {subscription.route.number}"

async def read():
    reader = Reader(Codec(bytes))
    await reader.listen("127.0.0.1")
    for _ in range(10):
        one = reader.open(lambda item: print("got", flush=True))
        one._ended.add_done_callback(lambda ended, one=one: print(said(one, ended), flush=True))
    print(one.route.port, reader.key.hex(), flush=True)
    await asyncio.Event().wait()

asyncio.run(write(*sys.argv[2:]) if sys.argv[1] == "write" else read())
"""


async def child(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CHILD, *arguments),
        cwd=Path(__file__).parents[3],
        stdout=asyncio.subprocess.PIPE,
    )


async def test_a_writer_that_is_killed_ends_all_its_streams_at_once_and_no_others() -> None:
    reader: Reader[bytes] = Reader(Codec(bytes))
    await reader.listen("127.0.0.1")

    async def hear(subscription: Any) -> None:
        with subscription:
            await subscription.finish(asyncio.Event().wait(), lambda error: True)

    processes, hearing = [], []
    for _ in range(2):
        got: list[bytes] = []
        subscriptions = [reader.open(got.append) for _ in range(10)]
        route = subscriptions[0].route
        processes.append(await child("write", route.host, str(route.port), route.key.hex(), str(route.number)))
        await settled(lambda got=got: len(got) == 10)
        hearing.append([asyncio.create_task(hear(one)) for one in subscriptions])
    for left, (process, streams) in zip((10, 0), zip(processes, hearing, strict=True), strict=True):
        process.send_signal(signal.SIGKILL)
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert {type(result) for result in results} == {ChannelLost}
        assert reader.subscriptions == left
        assert reader.links == left / 10
        await process.wait()
    reader.stop()


async def test_a_reader_that_is_killed_cancels_all_work_for_it_at_once_and_no_other() -> None:
    writer: Writer[bytes] = Writer(Codec(bytes), 100)
    processes, answering = [], []

    async def answer(route: Route, endless: Endless) -> None:
        with writer.open(route) as sender:
            await endless.work(sender.send)

    for _ in range(2):
        process, endless = await child("read"), Endless()
        assert process.stdout is not None
        port, key = (await process.stdout.readline()).decode().split()
        routes = [Route("127.0.0.1", int(port), bytes.fromhex(key), number) for number in range(1, 11)]
        processes.append(process)
        answering.append((endless, [asyncio.create_task(answer(route, endless)) for route in routes]))
        for _ in routes:
            assert await process.stdout.readline() == b"got\n"
    for left, process, (endless, streams) in zip((1, 0), processes, answering, strict=True):
        process.send_signal(signal.SIGKILL)
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert {type(result) for result in results} == {ChannelLost}
        assert endless.cancelled == 10
        assert (writer.links, sum(one.cancelled for one, _ in answering)) == (left, 20 - 10 * left)
        await process.wait()


async def test_a_reader_that_stands_still_holds_back_its_streams_and_ends_only_the_one_that_is_too_much() -> None:
    process = await child("read")
    assert process.stdout is not None
    port, key = (await process.stdout.readline()).decode().split()
    writer: Writer[bytes] = Writer(Codec(bytes), 20)
    end = asyncio.Event()

    async def steady(sink: Sink[bytes]) -> None:
        sink(b"a")
        await end.wait()
        for _ in range(9):
            sink(b"a")

    async def greedy(sink: Sink[bytes]) -> None:
        while True:
            sink(b"x" * 65536)
            await asyncio.sleep(0)

    async def answer(number: int, work: Callable[[Sink[bytes]], Any]) -> None:
        with writer.open(Route("127.0.0.1", int(port), bytes.fromhex(key), number)) as sender:
            await work(sender.send)

    answering = asyncio.create_task(answer(1, steady))
    assert await process.stdout.readline() == b"got\n"
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(BacklogFull):
        await answer(2, greedy)
    end.set()
    await answering  # the end of its stream waits with its items
    stopping = asyncio.create_task(writer.stop())
    await asyncio.sleep(0)
    process.send_signal(signal.SIGCONT)
    await stopping
    lines = [await process.stdout.readline() for _ in range(2)]
    while b"whole 1\n" not in lines:
        lines.append(await process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert b"failed 2\n" in [*lines, *(await process.stdout.read()).splitlines(keepends=True)]
