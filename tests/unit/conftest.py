"""What unit tests share: the embedded model's tokenizer, a vocabulary where an id is a byte, and a virtual clock."""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from serve_app.config import ModelSection
from serve_app.messages import RequestContext
from serve_app.vocabulary import Vocabulary, load_tokenizer

# No deadline per example: these machines are shared, and the wall clock says nothing about the code.
settings.register_profile(
    "tokenline",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    print_blob=True,
)
settings.load_profile("tokenline")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The embedded model's tokenizer. `make model` has prepared it."""
    return load_tokenizer(ModelSection(name="m", source="embedded:smollm2-135m-instruct"))


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Any) -> Vocabulary:
    return Vocabulary(tokenizer)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """A byte-level tokenizer with no merges: id 0 to 255 is that byte, 256 is special, 257 and 258 are added words."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
    backend = Tokenizer(models.BPE(vocab=stand_ins, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("two words", normalized=False), AddedToken("日本", normalized=False)])
    return SimpleNamespace(backend_tokenizer=backend)


@pytest.fixture(scope="session")
def byte_vocabulary(byte_tokenizer: Any) -> Vocabulary:
    return Vocabulary(byte_tokenizer)


@pytest.fixture
def context() -> RequestContext:
    return RequestContext(request_id="r1", deadline_s=time.time() + 600)


class _VirtualSelector(selectors.SelectSelector):
    """Waits for nothing: the time that the loop would wait is added to its clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError("every task waits for something that will never happen")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer, so that hours pass in no time and a deadlock is an error."""

    def __init__(self) -> None:
        self._clock = _VirtualSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


@pytest.fixture
def run_virtual() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine on a `VirtualLoop`; `asyncio.get_running_loop().time()` in it starts at 0."""

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(coroutine)

    return run
