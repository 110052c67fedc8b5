"""Owns what a person sees while the service starts: one line per step, with a ticking clock on a terminal.

Knows nothing of what the steps are.
"""

import time
from collections.abc import Callable
from typing import TextIO

_HEARTBEAT_S = 15.0
_ERASE_LINE = "\r\x1b[2K"


class Reporter:
    """Writes to `out`, or nowhere. On a terminal (`live`) the steps under way share one line that `tick` redraws."""

    def __init__(
        self, out: TextIO | None, live: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out
        self._live = bool(out and out.isatty()) if live is None else live
        self._clock = clock
        self._running: dict[str, tuple[str, float]] = {}
        self._last_beat = clock()
        self._drawn = False

    def start(self, step: str, doing: str) -> None:
        """A step begins, or goes on to something else; its clock starts at its first call."""
        began = self._running[step][1] if step in self._running else self._clock()
        self._running[step] = (doing, began)
        if self._live:
            self.tick()
        else:
            self.say(f"{step}: {doing} …")

    def done(self, step: str, what: str = "ready") -> None:
        """A step is over, well or badly; `what` says how."""
        _, began = self._running.pop(step, ("", self._clock()))
        self.say(f"{step}: {what} after {self._clock() - began:.1f} s")

    def tick(self) -> None:
        """Show that time passes; call it a few times a second."""
        now = self._clock()
        line = ", ".join(f"{step}: {doing} … {now - began:.0f} s" for step, (doing, began) in self._running.items())
        if self._live:
            self._write(_ERASE_LINE + line)
            self._drawn = bool(line)
        elif line and now - self._last_beat >= _HEARTBEAT_S:
            self.say(line)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._last_beat = self._clock()
        self._write((_ERASE_LINE if self._drawn else "") + text + "\n")
        self._drawn = False

    def clear(self) -> None:
        """Forget the steps under way and take their line off the terminal."""
        self._running.clear()
        if self._drawn:
            self._write(_ERASE_LINE)
            self._drawn = False

    def _write(self, text: str) -> None:
        if self._out is None:
            return
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):
            self._out = None  # the terminal has gone, or the reader of a pipe: no reason to leave processes behind
