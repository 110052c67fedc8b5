"""Every test of the channel runs on asyncio's own event loop and on the one that Ray gives its replicas. After each,
nothing may be left: no task, no call, no error that nobody saw."""

import asyncio
import gc
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import pytest
import uvloop

from serve_app.channel.reader import _left

_loops: list[asyncio.AbstractEventLoop] = []
_complaints: list[dict[str, Any]] = []


def _watched(new: Callable[[], asyncio.AbstractEventLoop]) -> asyncio.AbstractEventLoop:
    loop = new()
    loop.set_exception_handler(lambda _, complaint: _complaints.append(complaint))
    _loops.append(loop)
    return loop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": partial(_watched, asyncio.new_event_loop), "uvloop": partial(_watched, uvloop.new_event_loop)}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    result = yield
    gc.collect(1)  # what a test made is young
    tasks = [task for loop in _loops if not loop.is_closed() for task in asyncio.all_tasks(loop)]
    assert not tasks
    assert not _left
    assert not _complaints
    return result


def pytest_runtest_teardown() -> None:
    _loops.clear()
    _complaints.clear()
    _left.clear()
