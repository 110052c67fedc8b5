"""The model's tokenizer as two hops need it: loaded once per process, and each id as the exact bytes it stands for.

Knows nothing of requests. Bytes, because a token may end inside a character: text is decoded from the bytes of many
tokens, and only whole characters come out. Supported are the two byte-exact families that language models use:
byte-level BPE, and SentencePiece-style vocabularies with byte fallback. Others are refused when the process starts.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from serve_app.config import ModelSection
from serve_app.errors import ConfigError
from serve_app.model import locate

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def load_tokenizer(model: ModelSection) -> Any:
    """The Hugging Face tokenizer of the configured model, its chat template replaced if the config says so.

    Raises ConfigError when the model, its tokenizer or the template file cannot be read.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds of import, needed in two hops only

    try:
        tokenizer = AutoTokenizer.from_pretrained(locate(model.source), trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.source: no tokenizer could be loaded from {model.source}: {error}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(
            f"model.source: the tokenizer of {model.source} has no fast (Rust) implementation, which is needed here"
        )
    if model.chat_template_path is not None:
        try:
            tokenizer.chat_template = Path(model.chat_template_path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"model.chat_template_path: {error}") from error
    return tokenizer


class Vocabulary:
    """Ids, and the bytes and text they stand for.

    `size` is the number of ids, `special_ids` those that are skipped when text is made (end of sequence and the like).
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = tokenizer.backend_tokenizer
        tokens: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.size = max(tokens.values()) + 1
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        to_bytes = _byte_rule(json.loads(backend.to_str()).get("decoder") or {})
        self._raw = [b""] * self.size
        for token, id_ in tokens.items():
            self._raw[id_] = token.encode("utf-8") if id_ in self.special_ids else to_bytes(token)

    def raw_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, special or not; empty for an id that the vocabulary does not use."""
        return self._raw[token_id] if 0 <= token_id < self.size else b""

    def text_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text: its bytes, or nothing for a special token."""
        return b"" if token_id in self.special_ids else self.raw_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """A token on its own as text, for display; bytes that are no whole character become U+FFFD."""
        return self.raw_bytes(token_id).decode("utf-8", "replace")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens included, without an unfinished character at the end."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return "".join(decoder.decode(self.raw_bytes(token_id)) for token_id in ids)

    @cached_property
    def longest_token_bytes(self) -> int:
        """Length of the longest token, in bytes."""
        return max(map(len, self._raw))


def _byte_rule(decoder: dict[str, Any]) -> Callable[[str], bytes]:
    """How a token of this decoder becomes bytes. Raises ConfigError for a decoder whose bytes are unknown."""
    parts = decoder.get("decoders", [decoder])
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        alphabet = _byte_level_alphabet()

        def byte_level(token: str) -> bytes:
            # As the decoder in Rust does it: a token with one foreign character (an added token) is taken as plain
            # text.
            mapped = [alphabet.get(character) for character in token]
            return token.encode("utf-8") if None in mapped else bytes(byte for byte in mapped if byte is not None)

        return byte_level
    if "ByteFallback" in kinds:

        def byte_fallback(token: str) -> bytes:
            match = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(match.group(1), 16)]) if match else token.replace("▁", " ").encode("utf-8")

        return byte_fallback
    raise ConfigError(f"model.source: the tokenizer's decoder ({', '.join(map(str, kinds))}) is not byte-exact")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (`bytes_to_unicode` in its encoder.py): character → byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
