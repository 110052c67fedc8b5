"""Requests made up stage by stage."""

from collections.abc import Callable

import pytest
from stage_by_stage import made

from serve_app.messages import RequestMetrics


@pytest.fixture
def make() -> Callable[..., RequestMetrics]:
    """See `made`."""
    return made
