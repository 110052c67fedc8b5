"""Remembered segments give exactly the ids of tokenizing afresh, or are not used."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from serve_app.tokenizer.segments import SegmentCache

WORDS = ["", " ", "\n", "hello world " * 30, "  two", "日本語 テキスト" * 20, "👩\u200d👩\u200d👧", "é"]
MARKERS = ["<|im_", "start|>", "<|im_start|>", "<|endoftext|>"]
TEXTS = st.text(max_size=40) | st.sampled_from(WORDS + MARKERS)
CONVERSATIONS = st.lists(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXTS), max_size=6), max_size=4)


def fresh(backend: Any, text: str) -> tuple[int, ...]:
    return tuple(backend.encode(text, add_special_tokens=False).ids)


class Watched:
    """A tokenizer that counts the characters it encodes."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._backend.encode_batch(texts, **options)


@given(CONVERSATIONS)
def test_remembered_conversations_have_the_ids_of_fresh_ones(
    tokenizer: Any, conversations: list[list[tuple[str, str]]]
) -> None:
    backend = tokenizer.backend_tokenizer
    cache = SegmentCache(backend, 20_000)  # small: some is forgotten
    assert cache.works
    for turns in conversations:
        for end in range(1, len(turns) + 1):
            messages = [{"role": role, "content": text} for role, text in turns[:end]]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert cache.encode(text) == fresh(backend, text)


@given(st.lists(TEXTS, max_size=12).map("".join))
def test_any_text_has_the_ids_of_a_fresh_one_also_the_second_time(byte_tokenizer: Any, text: str) -> None:
    backend = byte_tokenizer.backend_tokenizer
    cache = SegmentCache(backend, 1 << 20)
    assert cache.works
    for words in (text, text * 5 + "<eos>two words日本" + text, text * 5 + "<eos>"):
        assert cache.encode(words) == cache.encode(words) == fresh(backend, words)


def test_the_next_turn_costs_what_is_new_in_it(tokenizer: Any) -> None:
    watched = Watched(tokenizer.backend_tokenizer)
    cache = SegmentCache(watched, 1 << 20)
    messages = [{"role": "user", "content": f"message {number} " * 50} for number in range(20)]
    cache.encode(tokenizer.apply_chat_template(messages, tokenize=False))
    watched.characters = 0
    messages.append({"role": "user", "content": "And now?"})
    cache.encode(tokenizer.apply_chat_template(messages, tokenize=False))
    assert watched.characters < 50


def test_what_is_remembered_is_bounded_and_the_latest_stays(tokenizer: Any) -> None:
    watched = Watched(tokenizer.backend_tokenizer)
    cache = SegmentCache(watched, 50_000)
    for number in range(200):
        cache.encode(f"<|im_start|>{number} {'word ' * 200}<|im_end|>")
        assert sum(200 + 4 * (len(text) + len(ids)) for text, ids in cache._ids.items()) <= 50_000
    assert 1 <= len(cache._ids) < 20
    watched.characters = 0
    cache.encode(f"<|im_start|>199 {'word ' * 200}<|im_end|>")
    assert watched.characters == 0


def test_a_segment_larger_than_all_memory_is_not_kept(tokenizer: Any) -> None:
    cache = SegmentCache(tokenizer.backend_tokenizer, 1000)
    text = "<|im_start|>" + "word " * 2000
    assert cache.encode(text) == cache.encode(text) == fresh(tokenizer.backend_tokenizer, text)
    assert not cache._ids
    assert cache._left_bytes == 1000


def words_of(*added: AddedToken, normalizer: Any = None, metaspace: bool = False) -> Tokenizer:
    letters = [*"abcdefghijklmnopqrstuvwxyzAé", "▁", " ", "\n", "日", "本", "語", "e\u0301"[1]]
    backend = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = (
        pre_tokenizers.Metaspace(prepend_scheme="first") if metaspace else pre_tokenizers.Whitespace()
    )
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens(list(added))
    return backend


PLAIN = AddedToken("<s>", special=True, normalized=False)


@pytest.mark.parametrize(
    ("backend", "works"),
    [
        (words_of(PLAIN), True),
        (words_of(), False),
        (words_of(PLAIN, metaspace=True), False),
        (words_of(PLAIN, normalizer=normalizers.Prepend("▁")), True),  # segment by segment, as the cache has it
        (words_of(AddedToken("<S>", special=False, normalized=True), normalizer=normalizers.Lowercase()), False),
        (words_of(AddedToken("<s>", special=True, normalized=False, lstrip=True), metaspace=True), False),
        (words_of(AddedToken("<s>", special=True, normalized=False, single_word=True)), False),
    ],
)
def test_it_is_off_for_tokenizers_whose_segments_depend_on_each_other(backend: Any, works: bool) -> None:
    cache = SegmentCache(backend, 1 << 20)
    assert cache.works == works
    for text in ("<s>hello world " * 30, "x<s>x " * 60, "hello " * 60 + "<s>"):
        assert cache.encode(text) == cache.encode(text) == fresh(backend, text)


def test_without_memory_nothing_is_remembered(tokenizer: Any) -> None:
    watched = Watched(tokenizer.backend_tokenizer)
    cache = SegmentCache(watched, 0)
    assert not cache.works
    for _ in range(3):
        cache.encode("<|im_start|>" + "word " * 200)
    assert watched.characters == 3 * len("<|im_start|>" + "word " * 200)
    assert Counter(map(type, cache.encode("one")))[int] == 1
