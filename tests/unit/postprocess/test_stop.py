"""Stop strings: the same cut however the text is split, and nothing sent that would have to be taken back."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.postprocess.stop import StopMatcher


def reference(text: str, stops: list[str], unarmed: int = 0) -> tuple[str, bool]:
    """Character by character: the text cut before the stop string that is complete first, the longest of several."""
    for end in range(unarmed + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def split(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]


def run(pieces: list[str], stops: list[str], unarmed_pieces: int = 0) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    sent = ""
    for number, piece in enumerate(pieces):
        sent += matcher.push(piece, armed=number >= unarmed_pieces)
        if matcher.stopped:
            return sent, True
    return sent + matcher.flush(), False


_alphabet = st.sampled_from(["ab", "abc", "aé", "日本𠮷", "e\u0301x", "👩\u200d"])
_texts_and_stops = _alphabet.flatmap(
    lambda alphabet: st.tuples(
        st.text(alphabet, max_size=24),
        st.lists(st.text(alphabet, min_size=1, max_size=6), min_size=1, max_size=4),
    )
)
_cuts = st.lists(st.integers(0, 100), max_size=12)


@given(case=_texts_and_stops, cuts=_cuts)
def test_the_text_is_cut_before_the_first_complete_stop_string_however_it_is_split(
    case: tuple[str, list[str]], cuts: list[int]
) -> None:
    text, stops = case
    expected = reference(text, stops)
    assert run(split(text, cuts), stops) == expected
    assert run([text], stops) == expected
    assert run(list(text), stops) == expected


@given(case=_texts_and_stops, cuts=_cuts)
def test_nothing_is_sent_that_must_be_taken_back_and_nothing_is_held_without_need(
    case: tuple[str, list[str]], cuts: list[int]
) -> None:
    text, stops = case
    final, _ = reference(text, stops)
    matcher, pushed, sent = StopMatcher(stops), "", ""
    for piece in split(text, cuts):
        pushed += piece
        sent += matcher.push(piece)
        assert final.startswith(sent)
        if matcher.stopped:
            assert sent == final
            return
        assert pushed.startswith(sent)
        held = pushed[len(sent) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@given(case=_texts_and_stops, cuts=_cuts, unarmed_pieces=st.integers(0, 14))
def test_no_stop_string_ends_within_unarmed_text_and_one_that_straddles_its_end_counts(
    case: tuple[str, list[str]], cuts: list[int], unarmed_pieces: int
) -> None:
    text, stops = case
    pieces = split(text, cuts)
    unarmed = len("".join(pieces[:unarmed_pieces]))
    assert run(pieces, stops, unarmed_pieces) == reference(text, stops, unarmed)


@given(case=_texts_and_stops, cuts=_cuts, unarmed_pieces=st.integers(0, 14))
def test_what_is_held_behind_unarmed_text_is_still_the_beginning_of_a_stop_string(
    case: tuple[str, list[str]], cuts: list[int], unarmed_pieces: int
) -> None:
    text, stops = case
    pieces = split(text, cuts)
    matcher, sent = StopMatcher(stops), ""
    for number, (piece, pushed) in enumerate(zip(pieces, accumulate(pieces), strict=True)):
        sent += matcher.push(piece, armed=number >= unarmed_pieces)
        if matcher.stopped:
            return
        held = pushed[len(sent) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@given(text=st.text(max_size=40), stops=st.lists(st.text(min_size=1, max_size=3), max_size=3), cuts=_cuts)
def test_text_and_stop_strings_of_any_characters_are_cut_alike(text: str, stops: list[str], cuts: list[int]) -> None:
    assert run(split(text, cuts), stops) == reference(text, stops)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two", ["two"], ("one ", True)),
        ("abcd", ["bcd", "bc"], ("a", True)),
        ("abcd", ["cd", "abcd"], ("", True)),
        ("abc", ["bc", "c"], ("a", True)),
        ("xaab", ["aab"], ("x", True)),
        ("aaab", ["aab"], ("a", True)),
        ("abab", ["abb"], ("abab", False)),
        ("stop", ["stop"], ("", True)),
        ("Stop", ["stop"], ("Stop", False)),
        ("say 停", ["停"], ("say ", True)),
        ("", ["x"], ("", False)),
    ],
)
def test_of_several_stop_strings_the_one_complete_first_counts_and_of_those_the_longest(
    text: str, stops: list[str], expected: tuple[str, bool]
) -> None:
    assert run([text], stops) == expected
    assert run(list(text), stops) == expected


def test_without_stop_strings_all_text_goes_out_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == "anything"
    assert matcher.flush() == ""
    assert not matcher.stopped


def test_the_beginning_of_a_stop_string_waits_and_goes_out_when_it_turns_into_something_else() -> None:
    matcher = StopMatcher(["###"])
    assert matcher.push("a##") == "a"
    assert matcher.push("b") == "##b"
    assert matcher.push("#") == ""
    assert matcher.flush() == "#"
    assert matcher.flush() == ""


def test_a_stop_string_within_unarmed_text_is_text() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("END", armed=False) == "END"
    assert matcher.push("x END") == "x "
    assert matcher.stopped


def test_a_stop_string_within_unarmed_text_stays_text_while_it_is_held_back_for_another_one() -> None:
    matcher = StopMatcher(["b", "abc"])
    assert matcher.push("ab", armed=False) == ""
    assert matcher.push("d") == "abd"
    assert not matcher.stopped


def test_a_stop_string_that_begins_in_unarmed_text_and_ends_after_it_stops() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("an EN", armed=False) == "an "
    assert matcher.push("D.") == ""
    assert matcher.stopped


def test_the_order_in_which_stop_strings_are_given_means_nothing() -> None:
    assert run(["xabc"], ["bc", "abc", "c"]) == run(["xabc"], ["c", "abc", "bc"]) == ("x", True)
