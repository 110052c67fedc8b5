import ast
import importlib.util
from pathlib import Path

import msgspec
import pytest

from serve_app.config import AppConfig, load
from serve_app.errors import RequestError
from serve_app.explain.comparison import DRIFT_LEVERS, HEAD_OF_LINE_LEVERS
from serve_app.explain.failures import FAILURES
from serve_app.explain.levers import BETWEEN, LAYERS
from serve_app.telemetry.names import STAGES, UNACCOUNTED

VLLM = "engine.vllm_args."
LEVERS = [
    lever
    for levers in (
        *(layer.levers for layer in LAYERS.values()),
        *(failure.levers for failure in FAILURES.values()),
        *HEAD_OF_LINE_LEVERS.values(),
        DRIFT_LEVERS,
    )
    for lever in levers
]
KEYS = sorted({lever.key for lever in LEVERS})


@pytest.fixture(scope="module")
def vllm_fields() -> set[str]:
    """Of `AsyncEngineArgs`, read from its source: importing vLLM takes longer than all these tests."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    source = Path(list(spec.submodule_search_locations)[0], "engine", "arg_utils.py").read_text()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {
        statement.target.id
        for one in classes
        if one.name in ("EngineArgs", "AsyncEngineArgs")
        for statement in one.body
        if isinstance(statement, ast.AnnAssign)
    }


def test_every_layer_of_a_request_is_in_the_table_with_levers() -> None:
    assert set(LAYERS) == {*STAGES, UNACCOUNTED}
    assert all(layer.levers and layer.meaning for layer in LAYERS.values())
    hops = {field.name for field in msgspec.structs.fields(AppConfig)}
    assert {layer.hop for layer in LAYERS.values()} <= {*hops, BETWEEN}


@pytest.mark.parametrize("key", [key for key in KEYS if not key.startswith(VLLM)])
def test_a_key_of_ours_exists(key: str) -> None:
    section: object = AppConfig
    for step in key.split("."):
        section = {field.name: field.type for field in msgspec.structs.fields(section)}[step]


@pytest.mark.parametrize("key", [key for key in KEYS if key.startswith(VLLM)])
def test_a_key_of_vllm_exists_and_may_be_given(key: str, vllm_fields: set[str]) -> None:
    name = key.removeprefix(VLLM)
    assert name in vllm_fields
    load({"model": {"name": "m", "source": "s"}, "engine": {"vllm_args": {name: 1}}})


def test_every_error_of_the_service_is_in_the_table() -> None:
    def walk(cls: type[RequestError]) -> set[type[RequestError]]:
        return {cls, *(below for one in cls.__subclasses__() for below in walk(one))}

    tree = walk(RequestError) - {RequestError}
    ours = {one for one in tree if one.__module__ == RequestError.__module__}
    assert {one.code for one in ours if one.status >= 500 or one.retryable} <= set(FAILURES)
