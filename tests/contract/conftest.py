"""The whole path in one process, without Ray: a real uvicorn on loopback over the simulated engine.

`serve` starts a path with a configuration of its own in milliseconds, because the tokenizer is loaded once per session;
`path` is the one that all tests share which need nothing special.
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any, TypeVar

import openai
import pytest
import uvicorn

from serve_app import config as configuration
from serve_app.aio import task_count
from serve_app.config import AppConfig
from serve_app.engine.sim_engine import SimEngine
from serve_app.gateway.readiness import Readiness
from serve_app.gateway.server import build_asgi
from serve_app.messages import EngineDelta, EngineRequest, LoadReport, PathReport, RequestContext, TokenizeRequest
from serve_app.model import EMBEDDED, context_tokens
from serve_app.path import Hops
from serve_app.postprocess.service import PostprocessService
from serve_app.tokenizer.encoder import PromptEncoder
from serve_app.tokenizer.service import TokenizerService
from serve_app.vocabulary import Vocabulary, load_tokenizer

T = TypeVar("T")

MODEL = "simulated"
CONTEXT_TOKENS = 8192
_START_TIMEOUT_S = 60.0

FAST = {"step_ms": 1.0, "step_ms_per_sequence": 0.0, "prefill_tokens_per_s": 1e9}


class WatchedEngine:
    """The simulated engine, and what tests wait for: `seen` has every request, `idle` is set while none is open."""

    def __init__(self, engine: SimEngine) -> None:
        self.engine = engine
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

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        self.seen.append(request)
        self._open += 1
        self.idle.clear()
        self._tell()
        try:
            async with aclosing(self.engine.generate(request)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._open -= 1
            if not self._open:
                self.idle.set()

    async def load(self) -> LoadReport:
        return await self.engine.load()

    async def report(self) -> PathReport:
        return PathReport(await self.engine.load(), {"engine": task_count()})


class Service:
    """A running path. `run` awaits something on the server's own event loop."""

    def __init__(self, config: AppConfig, tokenizer: Any, vocabulary: Vocabulary) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.encoder = PromptEncoder(tokenizer, context_tokens(config.model))
        self.watched: WatchedEngine
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
        engine = SimEngine(self.config.engine.sim, self.vocabulary.size)
        await engine.start()
        self.watched = WatchedEngine(engine)
        hops = Hops(
            TokenizerService(self.encoder, self.config.tokenizer.threads, self.config.tokenizer.item_timeout_s),
            PostprocessService(self.vocabulary, self.watched),
        )
        readiness = Readiness(self.config, hops)
        if self.config.engine.sim.fail_after_tokens is None and self.config.engine.sim.stall_after_tokens is None:
            await readiness.warm_up()
        else:
            readiness._warm = True  # a faulty engine answers no warm-up
        self.watched.seen.clear()
        app = build_asgi(self.config, hops, readiness)
        self._server = uvicorn.Server(
            uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=2)
        )
        self._started.set_result(None)
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            await engine.stop()


def _client_options(url: str) -> dict[str, Any]:
    return {"base_url": f"{url}/v1", "api_key": "unused", "max_retries": 0, "timeout": 30.0}


Serve = Callable[[Mapping[str, Any]], Service]


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
