"""The header as W3C defines it, with what is no header at all."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.telemetry.traceparent import Ids, is_sampled, parse, unrecorded, write

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_what_is_written_is_read() -> None:
    header = f"00-{TRACE}-{SPAN}-01"
    context = parse(header)
    assert context is not None
    assert (f"{context.trace_id:032x}", f"{context.span_id:016x}", context.is_remote) == (TRACE, SPAN, True)
    assert write(context) == header


def test_a_flag_that_is_not_ours_goes_on() -> None:
    context = parse(f"00-{TRACE}-{SPAN}-03")
    assert context is not None
    assert write(context).endswith("-03")


@pytest.mark.parametrize("header", [f"01-{TRACE}-{SPAN}-01", f"01-{TRACE}-{SPAN}-01-what-the-future-brings"])
def test_a_version_to_come_is_read_as_far_as_it_is_known(header: str) -> None:
    context = parse(header)
    assert context is not None
    assert write(context) == f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "garbage",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN.upper()}-01",
        f"00-{TRACE}-{SPAN}-0G",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"01-{TRACE}-{SPAN}-01.more",
        f"01-{TRACE}-{SPAN}-01-{'x' * 512}",
        f"００-{TRACE}-{SPAN}-01",
    ],
)
def test_what_is_no_header_is_none(header: str | None) -> None:
    assert parse(header) is None


@given(st.text(max_size=600))
def test_any_text_is_read_or_none(text: str) -> None:
    context = parse(text)
    assert context is None or context.is_valid


def test_sampled_is_the_lowest_bit() -> None:
    for flags in range(256):
        assert is_sampled(f"00-{TRACE}-{SPAN}-{flags:02x}") == bool(flags & 1)


def test_without_a_header_nothing_is_sampled() -> None:
    assert not is_sampled(None)
    assert not is_sampled("")


def test_an_unrecorded_span_stays_in_its_trace_and_says_that_it_is_not_recorded() -> None:
    own = write(unrecorded(parse(f"00-{TRACE}-{SPAN}-01"), Ids()))
    assert own.startswith(f"00-{TRACE}-")
    assert own.endswith("-00")
    assert SPAN not in own


def test_ids_do_not_repeat_where_a_library_seeds_the_global_generator() -> None:
    state = random.getstate()
    try:
        made = []
        for _ in range(2):
            random.seed(0)
            made += [Ids().generate_trace_id(), Ids().generate_span_id()]
    finally:
        random.setstate(state)
    assert len(set(made)) == 4
