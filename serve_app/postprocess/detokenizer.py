"""Token ids to text, one at a time, never half a character and never a piece of the prompt.

One UTF-8 decoder per choice, fed with each token's bytes. Where the prompt ends inside a character, its incomplete last
bytes are given to the decoder first: the completed character then belongs to the output, and nothing else of the prompt
can come out.
"""

import codecs
from collections.abc import Sequence

from serve_app.vocabulary import Vocabulary

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text state of one choice. Bytes that can never become a character come out as U+FFFD."""

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._decoder = _new_decoder("replace")
        self._decoder.decode(incomplete_tail(vocabulary, prompt_ids))

    @property
    def incomplete(self) -> bool:
        """Whether the bytes so far end inside a character."""
        return self._decoder.getstate()[0] != b""

    def push(self, token_id: int) -> str:
        """The characters that this token completes; empty while a character is still incomplete."""
        return self._decoder.decode(self._vocabulary.text_bytes(token_id))


def incomplete_tail(vocabulary: Vocabulary, ids: Sequence[int]) -> bytes:
    """The bytes of an unfinished character at the end of `ids`: 0 to 3 bytes."""
    tail = b""
    for token_id in reversed(ids):
        if len(tail) >= 3:
            break
        tail = vocabulary.text_bytes(token_id) + tail
    for length in (3, 2, 1):
        piece = tail[-length:]
        decoder = _new_decoder("replace")
        if len(piece) == length and decoder.decode(piece) == "" and decoder.getstate()[0] == piece:
            return piece
    return b""
