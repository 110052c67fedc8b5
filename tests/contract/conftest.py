"""The whole path in one process, without Ray: a real uvicorn on loopback over the simulated engine.

`serve` starts a path with a configuration of its own in milliseconds, because the tokenizer is loaded once per session;
`path` is the one that all tests share which need nothing special.
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any, TypeVar

import httpx
import msgspec
import openai
import pytest
import uvicorn

from serve_app import config as configuration
from serve_app.aio import Sink, task_count
from serve_app.config import AppConfig, DelaysSection
from serve_app.delays import choice_type, slow_tokenizer, slow_writes
from serve_app.engine.protocol import Engine
from serve_app.engine.service import EngineService
from serve_app.engine.sim_engine import SimEngine
from serve_app.gateway.observe import Telemetry
from serve_app.gateway.readiness import Readiness
from serve_app.gateway.server import Gateway
from serve_app.insight.reporting import Reporting
from serve_app.insight.service import InsightService
from serve_app.messages import (
    EngineDelta,
    EngineRequest,
    HopReport,
    LoadReport,
    PathReport,
    RequestContext,
    RequestMetrics,
    TokenizeRequest,
)
from serve_app.model import EMBEDDED, context_tokens
from serve_app.path import Hops
from serve_app.postprocess.service import PostprocessService
from serve_app.telemetry.metrics import Observation
from serve_app.telemetry.outbox import Outbox
from serve_app.telemetry.tracing import Tracing, start
from serve_app.tokenizer.encoder import PromptEncoder
from serve_app.tokenizer.service import TokenizerService
from serve_app.vocabulary import Vocabulary, load_tokenizer

T = TypeVar("T")

MODEL = "simulated"
CONTEXT_TOKENS = 8192
_START_TIMEOUT_S = 60.0

FAST = {"step_ms": 1.0, "step_ms_per_sequence": 0.0, "prefill_tokens_per_s": 1e9}


class ElsewhereEngine:
    """An engine on an event loop and a thread of its own, as it has a process of its own in the running application."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    async def start(self) -> None:
        await self._there(self._engine.start())

    async def stop(self) -> None:
        await self._there(self._engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)

    async def load(self) -> LoadReport:
        return await self._there(self._engine.load())

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        arrived: asyncio.Queue[EngineDelta | BaseException | None] = asyncio.Queue()
        here = asyncio.get_running_loop()

        async def pump() -> None:
            end: BaseException | None = None
            try:
                async with aclosing(self._engine.generate(request)) as deltas:
                    async for delta in deltas:
                        here.call_soon_threadsafe(arrived.put_nowait, delta)
            except Exception as error:  # noqa: BLE001 - raised where the deltas are read
                end = error
            here.call_soon_threadsafe(arrived.put_nowait, end)

        pumping = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (item := await arrived.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            pumping.cancel()

    def _main(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


class WatchedEngine:
    """The simulated engine, and what tests wait for: `seen` has every request, `idle` is set while none is open."""

    def __init__(self, engine: Engine, tracing: Tracing) -> None:
        self.engine = engine
        self.service = EngineService(engine, tracing)
        self.seen: list[EngineRequest] = []
        self.idle = asyncio.Event()
        self.idle.set()
        self._open = 0
        self._awaited: list[tuple[int, asyncio.Event]] = []

    async def reach(self, count: int) -> None:
        """Returns once `count` requests are open at the same time."""
        reached = asyncio.Event()
        self._awaited.append((count, reached))
        self._tell()
        await reached.wait()

    def _tell(self) -> None:
        for count, reached in self._awaited:
            if self._open >= count:
                reached.set()

    async def generate(self, request: EngineRequest, sink: Sink[EngineDelta]) -> None:
        self.seen.append(request)
        self._open += 1
        self.idle.clear()
        self._tell()
        try:
            await self.service.generate(request, sink)
        finally:
            self._open -= 1
            if not self._open:
                self.idle.set()

    async def load(self) -> LoadReport:
        return await self.engine.load()

    async def report(self) -> PathReport:
        return PathReport(await self.engine.load(), {"engine": task_count()})


class Observed:
    """A meter that keeps everything."""

    def __init__(self) -> None:
        self.observations: list[Observation] = []

    def record(self, observations: Sequence[Observation]) -> None:
        self.observations.extend(observations)


class Service:
    """A running path. `run` awaits something on the server's own event loop."""

    def __init__(self, config: AppConfig, tokenizer: Any, vocabulary: Vocabulary) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.encoder = PromptEncoder(
            slow_tokenizer(tokenizer, config.delays),
            context_tokens(config.model),
            int(config.tokenizer.cache_mib * 2**20),
        )
        self.tracings: dict[str, Tracing] = {}
        self.meter = Observed()
        self.watched: WatchedEngine
        self.readiness: Readiness
        self.loop: asyncio.AbstractEventLoop
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, name="path", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._started.result(_START_TIMEOUT_S)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(_START_TIMEOUT_S)
        assert not self._thread.is_alive(), "the server did not stop"

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 10.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def ids(self, text: str) -> tuple[int, ...]:
        """The text's token ids."""
        request = TokenizeRequest(RequestContext("ids", time.time() + 60), prompts=(text,), add_special_tokens=False)
        return self.encoder.encode(request).prompt_ids[0]

    def report(self) -> None:
        """What each replica does once a second."""
        self.run(self._reporting.once())

    def requests(self, **query: Any) -> tuple[RequestMetrics, ...]:
        """What `/insight/requests` says now."""
        self.report()
        answer = httpx.get(f"{self.url}/insight/requests", params=query)
        assert answer.status_code == 200, answer.text
        return msgspec.json.decode(answer.content, type=tuple[RequestMetrics, ...])

    def load(self) -> LoadReport:
        """The engine's load now."""
        return self.run(self.watched.load())

    def wait_busy(self, count: int = 1) -> None:
        """Returns once the engine has `count` requests at the same time."""
        self.run(self.watched.reach(count))

    def wait_idle(self) -> LoadReport:
        """Returns once the engine has no request any more, with its load."""
        self.run(self.watched.idle.wait())
        return self.load()

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**_client_options(self.url) | options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**_client_options(self.url) | options)

    def connect(self) -> socket.socket:
        """A bare TCP connection to the server."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        config, hop = self.config, self._hop
        engine: Engine = SimEngine(config.engine.sim, self.vocabulary.size, delays=config.delays)
        if config.delays != DelaysSection():
            engine = ElsewhereEngine(engine)  # a delay on this loop must not hold up the engine
        await engine.start()
        self.watched = WatchedEngine(engine, hop("engine"))
        settings = config.tokenizer
        postprocess = PostprocessService(
            self.vocabulary,
            self.watched,
            hop("postprocess"),
            coalesce_tokens=config.postprocess.stream_coalesce_tokens,
            choice_type=choice_type(config.delays),
        )
        hops = Hops(
            TokenizerService(self.encoder, settings.threads, settings.item_timeout_s, hop("tokenizer")),
            postprocess,
            config.channel.max_backlog_items,
        )
        insight = InsightService(config.insight)
        telemetry = Telemetry(hop("gateway"), Outbox(), insight)
        readiness = self.readiness = Readiness(self.config, hops)
        if self.config.engine.sim.fail_after_tokens is None and self.config.engine.sim.stall_after_tokens is None:
            await readiness.warm_up()
        else:
            readiness._warm = True  # a faulty engine answers no warm-up
        self.watched.seen.clear()
        gateway = Gateway(config, hops, readiness, telemetry)
        self._reporting = Reporting(self._sample, telemetry.outbox, MODEL, self.meter, insight)
        app = slow_writes(gateway, config.delays)
        self._server = uvicorn.Server(
            uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=2)
        )
        self._started.set_result(None)
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            await engine.stop()
            for tracing in self.tracings.values():
                await asyncio.to_thread(tracing.shutdown)

    def _hop(self, name: str) -> Tracing:
        """A tracer per hop, as each has in a process of its own."""
        self.tracings[name] = start(self.config.tracing, name, f"{name}-0", MODEL)
        return self.tracings[name]

    async def _sample(self) -> HopReport:
        load = await self.watched.load()
        dropped = sum(tracing.dropped_spans for tracing in self.tracings.values())
        exported = sum(tracing.exported_spans for tracing in self.tracings.values())
        return HopReport("gateway", "all-0", time.time(), 0, 0, exported, dropped, load=load)


def _client_options(url: str) -> dict[str, Any]:
    return {"base_url": f"{url}/v1", "api_key": "unused", "max_retries": 0, "timeout": 30.0}


Serve = Callable[[Mapping[str, Any]], Service]


@pytest.fixture(scope="session", autouse=True)
def _quick_spans() -> Iterator[None]:
    """Spans leave at once, not after 5 s."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return load_tokenizer(configuration.load({"model": {"name": MODEL, "source": EMBEDDED}}).model)


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Any) -> Vocabulary:
    return Vocabulary(tokenizer)


@pytest.fixture(scope="session")
def serve(tokenizer: Any, vocabulary: Vocabulary) -> Iterator[Serve]:
    """Starts a path for `args` (what stands under `args` in a Serve config file, merged into a fast simulation).

    The same args give the same, running path again; all end with the session.
    """
    running: dict[str, Service] = {}

    def start(args: Mapping[str, Any]) -> Service:
        key = repr(sorted(args.items()))
        if key not in running:
            service = Service(configuration.load(_merged(args)), tokenizer, vocabulary)
            service.start()
            running[key] = service
        return running[key]

    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [service.stop() for service in running.values()])
        yield start


def _merged(args: Mapping[str, Any]) -> dict[str, Any]:
    model = {"name": MODEL, "source": EMBEDDED, "context_tokens": CONTEXT_TOKENS}
    engine = dict(args.get("engine", {}))
    return {
        **args,
        "model": model | args.get("model", {}),
        "engine": {"kind": "sim", "device": "cpu"} | engine | {"sim": FAST | engine.get("sim", {})},
    }


@pytest.fixture(scope="session")
def path(serve: Serve) -> Service:
    """The shared path, with the default limits."""
    return serve({})


@pytest.fixture
def client(path: Service) -> Iterator[openai.OpenAI]:
    with path.client() as client:
        yield client


@pytest.fixture
async def async_client(path: Service) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with path.async_client() as client:
        yield client
