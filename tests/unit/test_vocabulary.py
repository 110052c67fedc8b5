"""Ids as bytes: the same text as the tokenizer library makes, for both families, and a refusal of all others."""

import json
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from serve_app.config import ModelSection
from serve_app.errors import ConfigError
from serve_app.vocabulary import Vocabulary, load_tokenizer

TEXTS = ["Hello, world!", "  two  spaces\n\ttab", "naïve café", "龘𠮷 日本語", "👩‍👩‍👧 🇩🇪", "▁ \ufffd é é", ""]


@pytest.fixture(scope="session")
def fallback_tokenizer() -> Any:
    """SentencePiece-like: `▁` for spaces, a byte token for every byte, and a few words."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Helowrd,é", "▁wo", "ld", "lo"]
    backend = Tokenizer(
        models.BPE(
            vocab={word: rank for rank, word in enumerate(words)},
            merges=[("l", "d"), ("l", "o")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("added▁word", normalized=False)])
    return SimpleNamespace(backend_tokenizer=backend)


def joined(vocabulary: Vocabulary, ids: list[int]) -> bytes:
    return b"".join(map(vocabulary.text_bytes, ids))


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_bytes_are_those_of_the_text(tokenizer: Any, vocabulary: Vocabulary, text: str) -> None:
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert joined(vocabulary, ids) == text.encode()


@given(seed=st.integers(0, 1 << 32))
def test_byte_level_ids_of_any_kind_decode_as_the_library_decodes_them(byte_tokenizer: Any, seed: int) -> None:
    vocabulary, chance = Vocabulary(byte_tokenizer), random.Random(seed)
    ids = [chance.randrange(vocabulary.size) for _ in range(chance.randrange(12))]
    library = byte_tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    assert joined(vocabulary, ids).decode("utf-8", "replace") == library


@given(seed=st.integers(0, 1 << 32))
def test_ids_of_the_embedded_model_decode_as_the_library_decodes_them(
    tokenizer: Any, vocabulary: Vocabulary, seed: int
) -> None:
    chance = random.Random(seed)
    ids = [chance.randrange(512 if chance.random() < 0.7 else vocabulary.size) for _ in range(chance.randrange(20))]
    library = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    assert joined(vocabulary, ids).decode("utf-8", "replace") == library


def test_every_single_token_of_the_embedded_model_decodes_as_in_the_library(
    tokenizer: Any, vocabulary: Vocabulary
) -> None:
    library = tokenizer.backend_tokenizer.decode_batch([[id_] for id_ in range(vocabulary.size)], False)
    assert [vocabulary.token_text(id_) for id_ in range(vocabulary.size)] == library


@given(text=st.text(alphabet="Helowrd, é日𠮷\u00ad\n", max_size=20) | st.sampled_from(TEXTS))
def test_byte_fallback_bytes_decode_as_the_library_decodes_them(fallback_tokenizer: Any, text: str) -> None:
    backend = fallback_tokenizer.backend_tokenizer
    ids = backend.encode(text, add_special_tokens=False).ids
    assert joined(Vocabulary(fallback_tokenizer), ids).decode() == backend.decode(ids, skip_special_tokens=True)


@given(seed=st.integers(0, 1 << 32))
def test_byte_fallback_ids_of_any_kind_decode_as_in_the_library_where_they_are_text(
    fallback_tokenizer: Any, seed: int
) -> None:
    vocabulary, chance = Vocabulary(fallback_tokenizer), random.Random(seed)
    pieces = [[chance.choice([1, 2, *range(259, vocabulary.size)])] for _ in range(6)]
    pieces += [[3 + byte for byte in chance.choice("é日𠮷a▁").encode()] for _ in range(4)]
    chance.shuffle(pieces)
    ids = sum(pieces, [])
    library = fallback_tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    assert joined(vocabulary, ids).decode() == library


def test_byte_fallback_tokens_are_single_bytes_and_words_lose_their_marker(fallback_tokenizer: Any) -> None:
    vocabulary = Vocabulary(fallback_tokenizer)
    ids = fallback_tokenizer.backend_tokenizer.get_vocab()
    assert vocabulary.raw_bytes(ids["<0x41>"]) == b"A"
    assert vocabulary.raw_bytes(ids["<0xFF>"]) == b"\xff"
    assert vocabulary.raw_bytes(ids["▁wo"]) == b" wo"
    assert vocabulary.raw_bytes(ids["added▁word"]) == b"added word"


def test_special_tokens_have_bytes_of_their_own_and_add_nothing_to_the_text(byte_vocabulary: Vocabulary) -> None:
    assert byte_vocabulary.special_ids == {256}
    assert byte_vocabulary.raw_bytes(256) == b"<eos>"
    assert byte_vocabulary.text_bytes(256) == b""
    assert byte_vocabulary.token_text(256) == "<eos>"


def test_added_tokens_that_are_not_special_are_text(byte_vocabulary: Vocabulary) -> None:
    assert byte_vocabulary.text_bytes(257) == b"two words"
    assert byte_vocabulary.text_bytes(258) == "日本".encode()


@pytest.mark.parametrize("id_", [-1, 259, 10**9])
def test_an_id_outside_the_vocabulary_has_no_bytes(byte_vocabulary: Vocabulary, id_: int) -> None:
    assert byte_vocabulary.raw_bytes(id_) == b""
    assert byte_vocabulary.text_bytes(id_) == b""
    assert byte_vocabulary.token_text(id_) == ""


def test_an_id_in_a_gap_of_the_vocabulary_has_no_bytes() -> None:
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 5}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    vocabulary = Vocabulary(SimpleNamespace(backend_tokenizer=backend))
    assert vocabulary.size == 6
    assert [vocabulary.raw_bytes(id_) for id_ in range(6)] == [b"a", b"", b"", b"", b"", b"b"]


def test_the_size_counts_added_tokens(byte_vocabulary: Vocabulary, vocabulary: Vocabulary) -> None:
    assert byte_vocabulary.size == 259
    assert vocabulary.size == 49_152


def test_part_of_a_character_on_its_own_is_shown_as_a_replacement_character(byte_vocabulary: Vocabulary) -> None:
    assert byte_vocabulary.token_text(0xE9) == "\ufffd"
    assert byte_vocabulary.raw_bytes(0xE9) == b"\xe9"


def test_decoding_keeps_special_tokens_and_leaves_out_an_unfinished_character(byte_vocabulary: Vocabulary) -> None:
    ids = [256, *"a龘".encode()]
    assert byte_vocabulary.decode(ids) == "<eos>a龘"
    assert byte_vocabulary.decode(ids[:-1]) == "<eos>a"
    assert byte_vocabulary.decode([]) == ""


def test_the_longest_token_is_measured_in_bytes(byte_vocabulary: Vocabulary) -> None:
    assert byte_vocabulary.longest_token_bytes == len(b"two words")


@pytest.mark.parametrize(
    "decoder",
    [decoders.WordPiece(), decoders.Metaspace(), decoders.BPEDecoder(), decoders.CTC(), decoders.Fuse(), None],
    ids=lambda one: type(one).__name__,
)
def test_a_decoder_that_is_not_byte_exact_is_refused_by_name(decoder: Any) -> None:
    backend = Tokenizer(models.WordLevel(vocab={"a": 0, "<unk>": 1}, unk_token="<unk>"))
    if decoder is not None:
        backend.decoder = decoder
    name = json.loads(backend.to_str())["decoder"]
    with pytest.raises(ConfigError, match=r"^model\.source: .*not byte-exact") as refused:
        Vocabulary(SimpleNamespace(backend_tokenizer=backend))
    assert (name or {"type": "None"})["type"] in str(refused.value)


def test_one_vocabulary_can_be_read_from_several_threads(vocabulary: Vocabulary) -> None:
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(vocabulary.longest_token_bytes)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [vocabulary.longest_token_bytes] * 8


def test_a_model_without_a_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.source: .*no tokenizer"):
        load_tokenizer(ModelSection(name="m", source=str(tmp_path)))


def test_a_model_folder_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.source: "):
        load_tokenizer(ModelSection(name="m", source=str(tmp_path / "none")))


def test_a_chat_template_of_our_own_replaces_the_models(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0]['content'] }} – ja?", "utf-8")
    loaded = load_tokenizer(
        ModelSection(name="m", source="embedded:smollm2-135m-instruct", chat_template_path=str(template))
    )
    text = loaded.apply_chat_template([{"role": "user", "content": "Grüße"}], tokenize=False)
    assert text == "Grüße – ja?"


@pytest.mark.parametrize("content", [None, b"\xff\xfe not UTF-8"], ids=["missing", "not text"])
def test_a_chat_template_that_cannot_be_read_is_a_config_error(tmp_path: Path, content: bytes | None) -> None:
    template = tmp_path / "chat.jinja"
    if content is not None:
        template.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^model\.chat_template_path: "):
        load_tokenizer(
            ModelSection(name="m", source="embedded:smollm2-135m-instruct", chat_template_path=str(template))
        )
