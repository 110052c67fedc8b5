"""One choice from deltas to text: the cut, the log-probabilities and the counts, whatever the tokens and deltas are."""

import codecs
import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from serve_app.messages import EngineDelta, FinishReason, Sampling, TokenLogprob
from serve_app.postprocess.choice import Choice, ScoredToken, Update
from serve_app.vocabulary import Vocabulary

Deltas = list[EngineDelta]


def whole_characters(raw: bytes) -> str:
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)


def text_of(vocabulary: Vocabulary, ids: list[int]) -> str:
    return whole_characters(b"".join(map(vocabulary.text_bytes, ids)))


def deltas_of(ids: list[int], sizes: list[int], reason: FinishReason = "length", logprobs: bool = True) -> Deltas:
    """The ids in deltas of the given sizes, the rest in a last one; the log-probability of token i is -i."""
    deltas, begin = [], 0
    for size in [*sizes, len(ids)]:
        end = min(begin + size, len(ids))
        scores = tuple(TokenLogprob(ids[at], -float(at)) for at in range(begin, end)) if logprobs else None
        deltas.append(EngineDelta(tuple(ids[begin:end]), logprobs=scores))
        begin = end
    last = deltas[-1]
    deltas[-1] = EngineDelta(last.token_ids, reason, logprobs=last.logprobs)
    return deltas


def run(choice: Choice, deltas: Deltas) -> Update:
    """All updates together, as far as the last one."""
    text, scored = "", []
    for delta in deltas:
        update = choice.push(delta)
        text += update.text
        scored += update.scored
        if update.finish_reason is not None:
            return Update(text, tuple(scored), update.finish_reason)
    raise AssertionError("no update had a finish reason")


def expected_cut(
    vocabulary: Vocabulary, ids: list[int], stops: list[str], min_tokens: int = 0
) -> tuple[str, int, bool]:
    """Text, tokens until it was complete, and whether a stop string cut it; character by character."""
    text = text_of(vocabulary, ids)
    for end in range(len(text_of(vocabulary, ids[:min_tokens])) + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            tokens = next(n for n in range(len(ids) + 1) if len(text_of(vocabulary, ids[:n])) >= end)
            return text[: end - max(map(len, complete))], tokens, True
    return text, len(ids), False


@pytest.fixture(scope="session")
def tokenized_at_random(vocabulary: Vocabulary) -> Any:
    """Some ids of the vocabulary whose bytes are a text's: often others than the tokenizer would choose."""
    by_bytes: dict[bytes, list[int]] = defaultdict(list)
    for id_ in range(vocabulary.size):
        by_bytes[vocabulary.text_bytes(id_)].append(id_)

    def tokenize(text: str, seed: int) -> list[int]:
        chance, raw, ids, at = random.Random(seed), text.encode(), [], 0
        while at < len(raw):
            pieces = [raw[at:end] for end in range(at + 1, min(at + 12, len(raw)) + 1)]
            piece = chance.choice([piece for piece in pieces if piece in by_bytes])
            ids.append(chance.choice(by_bytes[piece]))
            at += len(piece)
        return ids

    return tokenize


_texts = st.lists(
    st.sampled_from(
        ["the ", "then", "END", "\n\n", "龘", "𠮷", "日本語", "é", "e\u0301", "👩‍👩‍👧", "a", "ab", "abab", " "]
    ),
    max_size=10,
).map("".join)
_seeds = st.integers(0, 1 << 32)
_sizes = st.lists(st.integers(0, 5), max_size=12)


@st.composite
def texts_with_stops(draw: Any) -> tuple[str, list[str]]:
    """A text and stop strings, many of them pieces of it or nearly so."""
    text = draw(_texts)
    stops = []
    for _ in range(draw(st.integers(0, 3))):
        begin, length = draw(st.integers(0, max(0, len(text) - 1))), draw(st.integers(1, 5))
        stops.append((text[begin : begin + length] or "x") + draw(st.sampled_from(["", "", "a", "語"])))
    return text, stops


@given(case=texts_with_stops(), sizes=_sizes, seed=_seeds, min_tokens=st.integers(0, 6))
def test_text_is_cut_alike_however_it_is_tokenized_and_delivered(
    vocabulary: Vocabulary,
    tokenized_at_random: Any,
    case: tuple[str, list[str]],
    sizes: list[int],
    seed: int,
    min_tokens: int,
) -> None:
    text, stops = case
    ids = tokenized_at_random(text, seed)
    assert text_of(vocabulary, ids) == text
    choice = Choice(0, vocabulary, (), tuple(stops), Sampling(min_tokens=min_tokens))
    update = run(choice, deltas_of(ids, sizes, logprobs=False))
    wanted, tokens, cut = expected_cut(vocabulary, ids, stops, min_tokens)
    assert (update.text, update.finish_reason) == (wanted, "stop" if cut else "length")
    assert choice.generated == tokens
    assert update.scored == ()


@given(
    ids=st.lists(st.integers(0, 511) | st.integers(0, 49_151), max_size=16),
    sizes=_sizes,
    stops=st.lists(st.text("\ufffdae t\n", min_size=1, max_size=2), max_size=3),
)
def test_ids_of_any_kind_are_cut_alike_however_they_are_delivered(
    vocabulary: Vocabulary, ids: list[int], sizes: list[int], stops: list[str]
) -> None:
    choice = Choice(0, vocabulary, (), tuple(stops), Sampling())
    update = run(choice, deltas_of(ids, sizes))
    wanted, tokens, cut = expected_cut(vocabulary, ids, stops)
    assert (update.text, update.finish_reason, choice.generated) == (wanted, "stop" if cut else "length", tokens)


@given(text=_texts, sizes=_sizes, seed=_seeds, stop=st.sampled_from([(), ("never seen",), ("\n\nEND!",)]))
def test_the_bytes_of_the_scored_tokens_are_the_text_when_nothing_cuts_it(
    vocabulary: Vocabulary, tokenized_at_random: Any, text: str, sizes: list[int], seed: int, stop: tuple[str, ...]
) -> None:
    ids = tokenized_at_random(text, seed)
    update = run(Choice(0, vocabulary, (), stop, Sampling(logprobs=0)), deltas_of(ids, sizes))
    assert update.text == text
    assert [token.logprob for token in update.scored] == [TokenLogprob(id_, -float(at)) for at, id_ in enumerate(ids)]
    assert b"".join(vocabulary.raw_bytes(token.logprob.token_id) for token in update.scored) == text.encode()
    assert [token.offset for token in update.scored] == [len(text_of(vocabulary, ids[:at])) for at in range(len(ids))]


@given(case=texts_with_stops(), sizes=_sizes, seed=_seeds)
def test_a_cut_text_is_scored_as_far_as_it_goes_and_no_token_past_the_cut_is_given_out(
    vocabulary: Vocabulary, tokenized_at_random: Any, case: tuple[str, list[str]], sizes: list[int], seed: int
) -> None:
    text, stops = case
    ids = tokenized_at_random(text, seed)
    wanted, _, cut = expected_cut(vocabulary, ids, stops)
    assume(cut)
    update = run(Choice(0, vocabulary, (), tuple(stops), Sampling(logprobs=0)), deltas_of(ids, sizes))
    begins = [len(b"".join(map(vocabulary.raw_bytes, ids[:at]))) for at in range(len(ids))]
    within = [id_ for id_, begin in zip(ids, begins, strict=True) if begin < len(wanted.encode())]
    assert [token.logprob.token_id for token in update.scored] == within


@given(case=texts_with_stops(), sizes=_sizes, seed=_seeds)
def test_a_token_is_scored_no_earlier_than_its_text_goes_out(
    vocabulary: Vocabulary, tokenized_at_random: Any, case: tuple[str, list[str]], sizes: list[int], seed: int
) -> None:
    text, stops = case
    ids = tokenized_at_random(text, seed)
    choice = Choice(0, vocabulary, (), tuple(stops), Sampling(logprobs=0))
    sent, scored = "", b""
    for delta in deltas_of(ids, sizes):
        update = choice.push(delta)
        sent += update.text
        scored += b"".join(vocabulary.raw_bytes(token.logprob.token_id) for token in update.scored)
        if update.finish_reason is not None:
            return
        assert len(whole_characters(scored)) <= len(sent)


def test_a_stop_string_made_of_many_tokens_leaves_none_of_them_scored(byte_vocabulary: Vocabulary) -> None:
    choice = Choice(0, byte_vocabulary, (), ("龘",), Sampling(logprobs=0))
    update = run(choice, deltas_of(list("ab龘".encode()), [1] * 5))
    assert update.text == "ab"
    assert bytes(token.logprob.token_id for token in update.scored) == b"ab"


def test_a_token_that_a_stop_string_cuts_in_two_is_scored(byte_vocabulary: Vocabulary) -> None:
    choice = Choice(0, byte_vocabulary, (), ("words",), Sampling(logprobs=0))
    update = choice.push(EngineDelta((65, 257), logprobs=(TokenLogprob(65, -1.0), TokenLogprob(257, -2.0))))
    assert update == Update(
        "Atwo ", (ScoredToken(TokenLogprob(65, -1.0), 0), ScoredToken(TokenLogprob(257, -2.0), 1)), "stop"
    )


def test_a_stop_string_counts_no_tokens_after_it(byte_vocabulary: Vocabulary) -> None:
    choice = Choice(0, byte_vocabulary, (), ("b",), Sampling())
    assert choice.push(EngineDelta(tuple(b"abcdef"))) == Update("a", (), "stop")
    assert choice.generated == 2


def test_the_token_that_ends_the_text_is_counted_and_is_no_text(byte_vocabulary: Vocabulary) -> None:
    choice = Choice(0, byte_vocabulary, (), (), Sampling(logprobs=0))
    scores = (TokenLogprob(97, -1.0), TokenLogprob(98, -2.0))
    update = choice.push(EngineDelta((97, 98), "stop", ends_with_stop_token=True, logprobs=scores))
    assert update == Update("a", (ScoredToken(scores[0], 0),), "stop")
    assert choice.generated == 2


def test_an_ignored_end_of_sequence_is_no_text_and_the_text_goes_on(byte_vocabulary: Vocabulary) -> None:
    update = run(Choice(0, byte_vocabulary, (), (), Sampling(ignore_eos=True)), deltas_of([97, 256, 98, 256], [1] * 4))
    assert (update.text, update.finish_reason) == ("ab", "length")


def test_what_was_held_back_goes_out_with_the_last_delta_and_its_scores(byte_vocabulary: Vocabulary) -> None:
    choice = Choice(0, byte_vocabulary, (), ("bcd",), Sampling(logprobs=0))
    scores = tuple(TokenLogprob(byte, -1.0) for byte in b"abc")
    first = choice.push(EngineDelta(tuple(b"abc"), logprobs=scores))
    assert (first.text, len(first.scored), first.finish_reason) == ("a", 1, None)
    assert choice.push(EngineDelta((), "length")) == Update(
        "bc", (ScoredToken(scores[1], 1), ScoredToken(scores[2], 2)), "length"
    )


def test_what_was_held_back_goes_out_when_a_stop_token_ends_the_text(byte_vocabulary: Vocabulary) -> None:
    choice = Choice(0, byte_vocabulary, (), ("bc",), Sampling())
    assert choice.push(EngineDelta(tuple(b"ab"))) == Update("a")
    assert choice.push(EngineDelta((256,), "stop", ends_with_stop_token=True)) == Update("b", (), "stop")


def test_a_stop_string_in_the_last_delta_decides_the_finish_reason(byte_vocabulary: Vocabulary) -> None:
    choice = Choice(0, byte_vocabulary, (), ("b",), Sampling())
    assert choice.push(EngineDelta(tuple(b"ab"), "length")) == Update("a", (), "stop")


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, ""), (2, "abx"), (4, "abx"), (5, "abxab")])
def test_no_stop_string_ends_within_min_tokens_and_one_that_straddles_its_end_counts(
    byte_vocabulary: Vocabulary, min_tokens: int, text: str
) -> None:
    choice = Choice(0, byte_vocabulary, (), ("ab",), Sampling(min_tokens=min_tokens))
    assert run(choice, deltas_of(list(b"abxab"), [1] * 5, logprobs=False)).text == text


def test_the_prompt_gives_its_open_character_to_the_text_and_can_be_part_of_no_stop_string(
    byte_vocabulary: Vocabulary,
) -> None:
    choice = Choice(0, byte_vocabulary, (*b"STO", 0xE9, 0xBE), ("STOP",), Sampling())
    assert run(choice, deltas_of([0x98, *b"P"], [1, 1], logprobs=False)) == Update("龘P", (), "length")


def test_a_delta_without_tokens_changes_nothing(byte_vocabulary: Vocabulary) -> None:
    choice = Choice(3, byte_vocabulary, (), ("x",), Sampling(logprobs=0))
    assert choice.push(EngineDelta((), logprobs=())) == Update("")
    assert (choice.index, choice.generated) == (3, 0)
