"""Ids of a conversation that grows turn by turn, for the cost of its new turn.

A tokenizer first cuts a text at its added tokens, which chat templates put around every message, and then tokenizes
each segment between two of them by itself. So the ids of a segment do not depend on its neighbours, and those of a
message that was in the conversation's last request can be remembered. Exact: `probe` proves it for a tokenizer before
anything is remembered, and there is no cache for one with which it does not hold.
"""

import re
import threading
from array import array
from collections import OrderedDict
from itertools import chain
from typing import Any

from serve_app.messages import TokenIds

# Shorter texts cost less to tokenize than to look up.
_LEAST_CHARACTERS = 256
# What an entry costs beside its text and its ids, four bytes each.
_ENTRY_BYTES = 200


class SegmentCache:
    """Remembers the latest segments, up to `max_bytes`; `works` says whether it does. For several threads."""

    def __init__(self, backend: Any, max_bytes: int) -> None:
        self._backend = backend
        self._left_bytes = max_bytes
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        # With nothing to remember, nothing is asked of the tokenizer.
        decoder = backend.get_added_tokens_decoder() if max_bytes > 0 else {}
        added = {token.content: id_ for id_, token in decoder.items()}
        # Of several that begin at one place the tokenizer takes the longest.
        longest_first = sorted(added, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if added else None
        self._added = {content: array("I", [id_]) for content, id_ in added.items()}
        # Added tokens that are looked for in the normalized text cannot be found in the text as it is.
        visible = not any(token.normalized for token in decoder.values()) or backend.normalizer is None
        self.works = self._cut is not None and visible and self._probe()

    def encode(self, text: str) -> TokenIds:
        """The ids of `text`, without the special tokens that a tokenizer may put around it."""
        if not self.works or len(text) < _LEAST_CHARACTERS:
            return tuple(self._fresh([text])[0])
        return self._by_segments(text)

    def _by_segments(self, text: str) -> TokenIds:
        pieces = self._pieces(text)
        known = {piece: self._added.get(piece) or self._recall(piece) for piece in pieces}
        missing = [piece for piece, ids in known.items() if ids is None]
        for piece, ids in zip(missing, self._fresh(missing), strict=True):
            known[piece] = ids
            self._remember(piece, ids)
        return tuple(chain.from_iterable(known[piece] or () for piece in pieces))

    def _fresh(self, texts: list[str]) -> list["array[int]"]:
        # `encode_batch` lets go of the GIL, `encode` holds it (tokenizers 0.23, measured).
        return [array("I", one.ids) for one in self._backend.encode_batch(texts, add_special_tokens=False)]

    def _recall(self, piece: str) -> "array[int] | None":
        with self._lock:
            ids = self._ids.get(piece)
            if ids is not None:
                self._ids.move_to_end(piece)
            return ids

    def _remember(self, piece: str, ids: "array[int]") -> None:
        with self._lock:
            if piece in self._ids:
                return
            self._ids[piece] = ids
            self._left_bytes -= _bytes_of(piece, ids)
            while self._left_bytes < 0:
                self._left_bytes += _bytes_of(*self._ids.popitem(last=False))

    def _probe(self) -> bool:
        """Whether texts cut at the added tokens give the ids of whole texts: not with a prefix for the first
        word of a text, or with added tokens that take the blanks beside them."""
        tokens = list(self._added)[:64]
        texts = ["word", " word", "word ", "\n", " two  words\n", "日本 語", "e\u0301", "A"]
        probes = [left + token + right for token in tokens for left in texts for right in texts]
        probes += [token + other for token in tokens for other in tokens]
        whole = [list(ids) for ids in self._fresh(probes)]
        cut = [piece for probe in probes for piece in self._pieces(probe) if piece not in self._added]
        ids_of = dict(zip(cut, self._fresh(cut), strict=True)) | self._added
        return whole == [list(chain.from_iterable(ids_of[piece] for piece in self._pieces(probe))) for probe in probes]

    def _pieces(self, text: str) -> list[str]:
        assert self._cut is not None
        return [piece for piece in self._cut.split(text) if piece]


def _bytes_of(piece: str, ids: "array[int]") -> int:
    return _ENTRY_BYTES + len(piece) * 4 + len(ids) * 4
