import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.telemetry.percentiles import Percentiles, percentiles


def test_no_values_have_no_percentiles() -> None:
    assert percentiles([]) is None


def test_one_value_is_every_percentile() -> None:
    assert percentiles([3.0]) == Percentiles(3.0, 3.0, 3.0)


def test_between_two_ranks_it_is_linear() -> None:
    found = percentiles([float(value) for value in range(101)][::-1])
    assert found == Percentiles(50.0, 95.0, 99.0)
    found = percentiles([1.0, 2.0])
    assert found is not None
    assert (found.p50, found.p95, found.p99) == pytest.approx((1.5, 1.95, 1.99))


@given(st.lists(st.floats(0, 1e9), min_size=1))
def test_they_rise_and_stay_within_the_values(values: list[float]) -> None:
    found = percentiles(values)
    assert found is not None
    slack = 1e-9 * max(values)
    assert min(values) - slack <= found.p50 <= found.p95 + slack
    assert found.p95 <= found.p99 + slack <= max(values) + 2 * slack
