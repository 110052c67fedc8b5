"""An engine without memory is told apart from one that failed for another reason; vLLM itself is not needed."""

import logging
import sys
from collections.abc import AsyncGenerator
from types import ModuleType
from typing import Any

import pytest

from serve_app.config import EngineSection, ModelSection
from serve_app.engine import vllm_engine
from serve_app.engine.vllm_engine import VllmEngine, is_out_of_memory
from serve_app.errors import EngineDied, InvalidRequest, OutOfMemory, Overloaded
from serve_app.messages import EngineDelta, EngineRequest, RequestContext, Sampling


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("HIP Out Of Memory"),
        caused(ValueError("engine core failed"), MemoryError()),
        caused(ValueError("a"), caused(KeyError("b"), RuntimeError("cuda runtime error (2) : out of memory"))),
    ],
)
def test_it_is_found_along_the_chain_of_causes(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_another_failure_is_not_taken_for_it() -> None:
    assert not is_out_of_memory(caused(RuntimeError("engine core died"), ValueError("bad shape")))


def test_an_error_that_came_while_another_was_handled_is_looked_through() -> None:
    error = RuntimeError("cleaning up failed")
    error.__context__ = MemoryError()
    assert is_out_of_memory(error)


# What the engine makes of it.


class VLLMClientError(ValueError):
    """vLLM's, for a request that is wrong."""


class GracefulHTTPError(Exception):
    """vLLM's, for a refusal."""

    message = "too much"


class EngineDeadError(Exception):
    """vLLM's, for an engine whose process has gone."""


@pytest.fixture(autouse=True)
def _fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names that `generate` imports, without the minutes that vLLM takes."""
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"TokensPrompt": dict},
        "vllm.exceptions": {"GracefulHTTPError": GracefulHTTPError, "VLLMClientError": VLLMClientError},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDeadError},
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(vllm_engine, "sampling_params", lambda sampling, max_tokens: None)
    monkeypatch.setattr(vllm_engine, "_delta", lambda output, sampling, first: EngineDelta(output))


class FakeLlm:
    """Gives one token, then raises."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        yield (1,)
        raise self._error


async def raised_by(error: Exception) -> tuple[list[EngineDelta], Exception]:
    """What a request gets before vLLM fails with `error`, and what that becomes."""
    engine = VllmEngine(ModelSection(name="m", source="s"), EngineSection())
    engine._llm = FakeLlm(error)
    request = EngineRequest(RequestContext("r", 0.0), "r-0", (1, 2), 8, Sampling())
    deltas = []
    try:
        async for delta in engine.generate(request):
            deltas.append(delta)
    except Exception as raised:  # noqa: BLE001 - which one is the question
        return deltas, raised
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        EngineDeadError("EngineCore encountered an issue: CUDA out of memory"),
        caused(EngineDeadError("EngineCore has died"), RuntimeError("HIP out of memory")),
    ],
)
async def test_want_of_memory_is_told_to_the_client_as_such(error: Exception) -> None:
    deltas, raised = await raised_by(error)
    assert [one.token_ids for one in deltas] == [(1,)]
    assert isinstance(raised, OutOfMemory)
    assert (raised.status, raised.code, raised.retryable) == (503, "out_of_memory", True)
    assert "GiB" not in raised.message


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (EngineDeadError("EngineCore has died"), EngineDied),
        (VLLMClientError("temperature: too high"), InvalidRequest),
        (GracefulHTTPError(), Overloaded),
        (EngineDied("The engine gave this request up (abort)."), EngineDied),
        (ValueError("bad shape"), RuntimeError),
    ],
)
async def test_other_failures_are_not(error: Exception, becomes: type[Exception]) -> None:
    _, raised = await raised_by(error)
    assert type(raised) is becomes


async def test_an_error_of_vllms_own_does_not_leave_this_file_with_its_class(caplog: pytest.LogCaptureFixture) -> None:
    class OfVllm(Exception):
        pass

    with caplog.at_level(logging.ERROR):
        _, raised = await raised_by(OfVllm("bad shape"))
    assert str(raised) == "vLLM failed: OfVllm: bad shape"
    assert raised.__cause__ is None
    assert "r-0" in caplog.text
