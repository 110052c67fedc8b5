"""Requests made up stage by stage."""

from collections.abc import Callable

import pytest
from stage_by_stage import made, turned_away

from serve_app.messages import RequestMetrics


@pytest.fixture
def make() -> Callable[..., RequestMetrics]:
    """See `made`."""
    return made


@pytest.fixture
def refused() -> Callable[..., RequestMetrics]:
    """See `turned_away`."""
    return turned_away
