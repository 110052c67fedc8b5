"""Ids to text one at a time: whole characters only, and nothing of the prompt."""

import codecs
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve_app.postprocess.detokenizer import Detokenizer, incomplete_tail
from serve_app.vocabulary import Vocabulary

TRICKY = ["龘", "𠮷", "👩‍👩‍👧", "🇩🇪", "é", "é", "a", " ", "\ufffd", "日本語", "½", "ﬀ", "\u200d", "Grüße", "\n\n"]


def output_of(vocabulary: Vocabulary, prompt_ids: list[int], output_ids: list[int]) -> str:
    detokenizer = Detokenizer(vocabulary, prompt_ids)
    return "".join(detokenizer.push(id_) for id_ in output_ids)


def whole_characters(raw: bytes) -> str:
    """The text of bytes without an unfinished character at the end; a single pass, as a check on the pieces."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)


def assert_every_cut_is_right(vocabulary: Vocabulary, library: Any, ids: list[int]) -> None:
    raw = [vocabulary.text_bytes(id_) for id_ in ids]
    whole = library.decode(ids, skip_special_tokens=True)
    finished = whole_characters(b"".join(raw))
    assert whole.startswith(finished)
    assert set(whole[len(finished) :]) <= {"\ufffd"}
    for cut in range(len(ids) + 1):
        prompt_text = whole_characters(b"".join(raw[:cut]))
        assert prompt_text + output_of(vocabulary, ids[:cut], ids[cut:]) == finished, cut


@given(text=st.lists(st.sampled_from(TRICKY), max_size=8).map("".join))
def test_wherever_a_text_is_cut_prompt_and_output_together_are_the_text(
    tokenizer: Any, vocabulary: Vocabulary, text: str
) -> None:
    library = tokenizer.backend_tokenizer
    ids = library.encode(text, add_special_tokens=False).ids
    assert_every_cut_is_right(vocabulary, library, ids)
    outputs = [output_of(vocabulary, ids[:cut], ids[cut:]) for cut in range(len(ids) + 1)]
    assert outputs[0] == text
    assert all(text.endswith(output) for output in outputs)


# Ids under 512 are the bytes and the pieces of characters: drawn often, so that characters are left open often.
_ordinary_ids = st.lists(st.integers(17, 511) | st.integers(17, 49_151), max_size=14)


@given(ids=_ordinary_ids)
def test_whatever_the_ids_and_the_cut_prompt_and_output_together_are_what_the_library_decodes(
    tokenizer: Any, vocabulary: Vocabulary, ids: list[int]
) -> None:
    assert_every_cut_is_right(vocabulary, tokenizer.backend_tokenizer, ids)


@given(ids=st.lists(st.sampled_from([0, 1, 2, 180, 139, 242, 187, 250, 123, 132, 78]), max_size=9))
@example(ids=[180, 2, 139, 242])
def test_special_tokens_at_the_cut_change_nothing_of_the_text(
    tokenizer: Any, vocabulary: Vocabulary, ids: list[int]
) -> None:
    assert_every_cut_is_right(vocabulary, tokenizer.backend_tokenizer, ids)


@given(raw=st.lists(st.sampled_from(sorted(set("龘𠮷é👩a\ufffd".encode()) | {0xC0, 0xED, 0xF5, 0xFF})), max_size=10))
def test_bytes_that_are_no_text_come_out_as_the_library_shows_them(
    byte_tokenizer: Any, byte_vocabulary: Vocabulary, raw: list[int]
) -> None:
    assert_every_cut_is_right(byte_vocabulary, byte_tokenizer.backend_tokenizer, raw)


@pytest.mark.parametrize("character", ["龘", "𠮷", "👩", "é", "½"])
def test_a_prompt_that_ends_inside_a_character_gives_the_whole_character_to_the_output(
    byte_vocabulary: Vocabulary, character: str
) -> None:
    raw = character.encode()
    for cut in range(1, len(raw)):
        assert output_of(byte_vocabulary, [*b"prompt ", *raw[:cut]], [*raw[cut:], *b"!"]) == character + "!"
        assert incomplete_tail(byte_vocabulary, [*b"prompt ", *raw[:cut]]) == raw[:cut]


def test_a_character_comes_out_with_its_last_byte_and_not_before(byte_vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(byte_vocabulary, [])
    assert [detokenizer.push(byte) for byte in "a𠮷b".encode()] == ["a", "", "", "", "𠮷", "b"]


@pytest.mark.parametrize("prompt", ["\ufffd", "what is \ufffd", "\ufffd\ufffd"])
def test_a_replacement_character_in_the_prompt_stays_in_the_prompt(byte_vocabulary: Vocabulary, prompt: str) -> None:
    assert output_of(byte_vocabulary, list(prompt.encode()), list(b" this")) == " this"
    assert incomplete_tail(byte_vocabulary, list(prompt.encode())) == b""


def test_a_replacement_character_that_the_model_writes_comes_out(byte_vocabulary: Vocabulary) -> None:
    assert output_of(byte_vocabulary, list(b"p"), list("\ufffd!".encode())) == "\ufffd!"


def test_an_unfinished_character_of_the_prompt_that_is_not_completed_is_shown_as_broken(
    byte_vocabulary: Vocabulary,
) -> None:
    assert output_of(byte_vocabulary, [*b"p", 0xE9, 0xBE], list(b"ab")) == "\ufffdab"


def test_special_tokens_in_the_output_are_no_text_and_do_not_break_a_character(byte_vocabulary: Vocabulary) -> None:
    assert output_of(byte_vocabulary, [], [256, 0xE9, 256, 0xBE, 0x98, 256]) == "龘"


@pytest.mark.parametrize(
    ("raw", "tail"),
    [
        (b"", b""),
        (b"abc", b""),
        (b"\xe9", b"\xe9"),
        (b"a\xe9\xbe", b"\xe9\xbe"),
        (b"\xe9\xbe\x98", b""),
        (b"\xf0\xa0\xae", b"\xf0\xa0\xae"),
        (b"\xf0\xa0\xae\xb7", b""),
        (b"\x98\x98", b""),
        (b"\xf0\xe9\xbe", b"\xe9\xbe"),
        (b"\xe9\xe9", b"\xe9"),
        (b"\xc0", b""),
        (b"\xff\xff\xff", b""),
    ],
)
def test_the_tail_is_what_could_still_become_a_character(byte_vocabulary: Vocabulary, raw: bytes, tail: bytes) -> None:
    assert incomplete_tail(byte_vocabulary, list(raw)) == tail


def test_the_tail_of_a_long_prompt_is_found_without_reading_all_of_it(byte_vocabulary: Vocabulary) -> None:
    class Watched(list[int]):
        read = 0

        def __reversed__(self) -> Any:
            for id_ in list.__reversed__(self):
                self.read += 1
                yield id_

    prompt = Watched([*b"long " * 10_000, 0xE9])
    assert incomplete_tail(byte_vocabulary, prompt) == b"\xe9"
    assert prompt.read <= 4
