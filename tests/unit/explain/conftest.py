"""Requests made up stage by stage, for the rules of `tokenline explain`."""

from collections.abc import Callable

import pytest
from stage_by_stage import made

from serve_app.messages import RequestMetrics


@pytest.fixture
def make() -> Callable[..., RequestMetrics]:
    """See `made`."""
    return made


@pytest.fixture
def refused(make: Callable[..., RequestMetrics]) -> Callable[..., RequestMetrics]:
    """A request that was turned away after the stages of these names."""

    def build(*reached: str, code: str = "overloaded", outcome: str = "refused", status: int = 429) -> RequestMetrics:
        whole = make()
        stages = tuple(stage for stage in whole.stages if stage.name in reached)
        fields = {"stages": stages, "choices": (), "first_write_s": None, "error": code, "outcome": outcome}
        return make(fields=fields | {"status": status, "ended_s": whole.arrived_s + 0.01, "completion_tokens": None})

    return build
