"""Bars and curves of characters: block characters, or ASCII where a terminal may not have others."""

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TextIO

from cachefs_tools.cachectl.top.history import levels

# Terminals whose fonts have hardly more than ASCII: real ones, and the console of Linux.
_PLAIN: Final = ("dumb", "linux", "vt100", "vt102", "vt220", "ansi", "unknown")


@dataclass(frozen=True, slots=True)
class Pen:
    """How bars and curves are drawn."""

    full: str
    empty: str
    # From nothing to the most.
    steps: str
    # Behind the heading by which rows are sorted: falling, rising.
    down: str
    up: str
    # In place of what was left out. One character.
    ellipsis: str

    def bar(self, part: float, width: int) -> str:
        """A bar for a part of a whole, 0 to 1. It is full only where the part is all of it, and empty only for 0."""
        filled = round(min(1.0, max(0.0, part)) * width)
        if part > 0 and filled == 0:
            filled = 1
        if part < 1 and filled == width:
            filled = width - 1
        return self.full * filled + self.empty * (width - filled)

    def curve(self, points: Iterable[float], width: int) -> str:
        """The last *width* points, each at least 0; the highest one reaches to the top."""
        top = len(self.steps) - 1
        return "".join(
            self.steps[0] if level <= 0 else self.steps[max(1, round(level * top))] for level in levels(points, width)
        )


BLOCKS: Final = Pen("█", "░", " ▁▂▃▄▅▆▇█", "↓", "↑", "…")
ASCII: Final = Pen("#", ".", " _.-=+*#", "v", "^", "~")


def pen_for(stream: TextIO = sys.stdout, environment: Mapping[str, str] = os.environ) -> Pen:
    """The pen that a terminal and its encoding can show."""
    encoding = (stream.encoding or "ascii").lower().replace("-", "")
    plain = environment.get("TERM", "dumb") in _PLAIN and stream.isatty()
    return BLOCKS if encoding == "utf8" and not plain else ASCII
