"""An engine without memory is told apart from one that failed for another reason."""

import pytest

from serve_app.engine.vllm_engine import is_out_of_memory


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
