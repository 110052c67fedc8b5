"""Whatever is put on a span can be encoded."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from serve_app.telemetry.span_values import clean, nanoseconds, not_before, text


def test_none_is_left_out_and_false_and_zero_are_not() -> None:
    assert clean({"a": None, "b": False, "c": 0, "d": "", "e": 0.0}) == {"b": False, "c": 0, "d": "", "e": 0.0}


def test_half_a_surrogate_pair_is_replaced_wherever_it_stands() -> None:
    assert clean({"a": "x\ud800y", "b": ["\udfff", "é"]}) == {"a": "x?y", "b": ["?", "é"]}


def test_an_integer_of_more_than_64_bits_is_text() -> None:
    assert clean({"a": 1 << 63, "b": (1 << 63) - 1, "c": -(1 << 63)}) == {
        "a": "9223372036854775808",
        "b": (1 << 63) - 1,
        "c": -(1 << 63),
    }


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_can_be_encoded_and_well_formed_text_is_untouched(given_text: str) -> None:
    AnyValue(string_value=text(given_text)).SerializeToString()
    if not any("\ud800" <= letter <= "\udfff" for letter in given_text):
        assert text(given_text) == given_text


@pytest.mark.parametrize("seconds", [None, float("nan"), float("inf"), float("-inf"), -1.0, 1e300])
def test_what_is_no_moment_is_now(seconds: Any) -> None:
    assert nanoseconds(seconds) is None


@given(st.floats(min_value=0, max_value=9e9), st.floats(min_value=0, max_value=9e9))
def test_nanoseconds_keep_the_order(one_s: float, other_s: float) -> None:
    early, late = nanoseconds(min(one_s, other_s)), nanoseconds(max(one_s, other_s))
    assert early is not None
    assert late is not None
    assert 0 <= early <= late


def test_an_end_before_the_begin_is_the_begin() -> None:
    assert not_before(5, 3) == 5
    assert not_before(3, 5) == 5
    assert not_before(None, None) > 1_700_000_000_000_000_000
