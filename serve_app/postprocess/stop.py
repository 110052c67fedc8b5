"""Stop strings over a stream of text pieces: what may go out, what must wait, and where the text ends.

The text is cut before the stop string that is complete first, as if characters came one by one, so the result is the
same however the text is split into pieces (vLLM's rule too). Of two that end at the same character the longer one
counts. Pure: no clock, no I/O.
"""

from collections.abc import Sequence


class StopMatcher:
    """Holds back only text that may still turn into a stop string; `stopped` is True once one was complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._blind = 0  # leading characters of `_held` at which no stop string may end
        self.stopped = False

    def push(self, text: str, armed: bool = True) -> str:
        """The text that may go out now. Unarmed (below `min_tokens`) no stop string may end within `text`."""
        if not self._stops:
            return text
        buffer = self._held + text
        blind = self._blind if armed else len(buffer)
        start = self._first_stop(buffer, blind)
        if start is not None:
            self.stopped = True
            self._held = ""
            return buffer[:start]
        keep = self._partial_length(buffer)
        ready, self._held = buffer[: len(buffer) - keep], buffer[len(buffer) - keep :]
        self._blind = max(0, blind - len(ready))
        return ready

    def flush(self) -> str:
        """The text that was held back, at the end of a generation that met no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, buffer: str, blind: int) -> int | None:
        """Where the stop string begins that ends first, and past the blind characters."""
        found: list[tuple[int, int]] = []
        for stop in self._stops:
            start = buffer.find(stop, max(0, blind - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        return min(found)[1] if found else None

    def _partial_length(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins a stop string without completing it."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
