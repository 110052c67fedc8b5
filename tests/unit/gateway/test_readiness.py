"""Ready means that the whole path has answered."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from streams import pushing

from serve_app.config import load
from serve_app.errors import EngineDied, HopUnavailable, NotReady
from serve_app.gateway import readiness
from serve_app.gateway.readiness import Readiness
from serve_app.messages import (
    GenerateRequest,
    LoadReport,
    PathReport,
    RequestContext,
    TokenIds,
    Tokenized,
    TokenizeRequest,
)
from serve_app.path import Hops

CONFIG = load({"model": {"name": "m", "source": "s"}})


class FakeTokenizer:
    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        return Tokenized(((1,),), (2,), 100, 50)

    async def detokenize(self, context: RequestContext, ids: TokenIds) -> str:
        raise NotImplementedError


class FakePostprocess:
    """Fails as often as it is told, then answers."""

    def __init__(self, failures: int = 0, error: Exception | None = None) -> None:
        self.calls = 0
        self._failures = failures
        self._error = error or HopUnavailable("no replica yet")
        self.report_error: Exception | None = None

    @pushing
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[bytes, None]:
        self.calls += 1
        if self.calls <= self._failures:
            raise self._error
        yield b"{}"

    async def report(self) -> PathReport:
        if self.report_error is not None:
            raise self.report_error
        return PathReport(LoadReport(0, 0, 0.0, 10), {"engine": 3})


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "_RETRY_S", 0.0)


async def test_it_is_not_ready_before_the_warm_up_and_says_why() -> None:
    ready = Readiness(CONFIG, Hops(FakeTokenizer(), FakePostprocess(), 100))
    with pytest.raises(NotReady, match="has not begun"):
        ready.require()
    with pytest.raises(NotReady):
        await ready.probe()


async def test_the_warm_up_is_repeated_until_it_is_answered() -> None:
    postprocess = FakePostprocess(failures=2)
    ready = Readiness(CONFIG, Hops(FakeTokenizer(), postprocess, 100))
    await asyncio.wait_for(ready.warm_up(), 5)
    assert postprocess.calls == 3
    ready.require()


async def test_an_error_nobody_foresaw_does_not_end_the_warm_up() -> None:
    postprocess = FakePostprocess(failures=1, error=KeyError("from anywhere"))
    ready = Readiness(CONFIG, Hops(FakeTokenizer(), postprocess, 100))
    await asyncio.wait_for(ready.warm_up(), 5)
    ready.require()
    postprocess.report_error = KeyError("from anywhere")
    with pytest.raises(NotReady):
        await ready.probe()


async def test_a_probe_collects_the_load_and_each_hops_tasks() -> None:
    ready = Readiness(CONFIG, Hops(FakeTokenizer(), FakePostprocess(), 100))
    await ready.warm_up()
    report = await ready.probe()
    assert report.engine.kv_blocks == 10
    assert report.tasks == {"engine": 3, "gateway": len(asyncio.all_tasks())}


async def test_a_path_that_was_warm_is_not_ready_while_its_engine_is_dead() -> None:
    postprocess = FakePostprocess()
    ready = Readiness(CONFIG, Hops(FakeTokenizer(), postprocess, 100))
    await ready.warm_up()
    postprocess.report_error = EngineDied("The engine is dead.")
    with pytest.raises(NotReady, match="The engine is dead"):
        await ready.probe()
    postprocess.report_error = None
    await ready.probe()
