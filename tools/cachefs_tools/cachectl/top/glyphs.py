"""Draws bars and curves with block characters, or with ASCII if the terminal cannot show others."""

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TextIO

from cachefs_tools.cachectl.top.history import relative_levels

# Terminals with little more than ASCII: real ones, and the Linux console.
_PLAIN: Final = ("dumb", "linux", "vt100", "vt102", "vt220", "ansi", "unknown")


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of bars and curves."""

    full: str
    empty: str
    # From nothing to the maximum.
    steps: str
    # Behind the heading of the sort column: descending, ascending.
    down: str
    up: str
    # Replaces omitted text. One character.
    ellipsis: str

    def draw_bar(self, part: float, width: int) -> str:
        """Draw a bar for a share from 0 to 1. It is full only for 1, and empty only for 0."""
        filled = round(min(1.0, max(0.0, part)) * width)
        if part > 0 and filled == 0:
            filled = 1
        if part < 1 and filled == width:
            filled = width - 1
        return self.full * filled + self.empty * (width - filled)

    def draw_curve(self, points: Iterable[float], width: int) -> str:
        """Draw the last *width* points, each at least 0, relative to the highest one."""
        top = len(self.steps) - 1
        return "".join(
            self.steps[0] if level <= 0 else self.steps[max(1, round(level * top))]
            for level in relative_levels(points, width)
        )


BLOCK_GLYPHS: Final = Glyphs("█", "░", " ▁▂▃▄▅▆▇█", "↓", "↑", "…")
ASCII_GLYPHS: Final = Glyphs("#", ".", " _.-=+*#", "v", "^", "~")


def glyphs_for(stream: TextIO = sys.stdout, environment: Mapping[str, str] = os.environ) -> Glyphs:
    """Return the pen for a terminal and its encoding."""
    encoding = (stream.encoding or "ascii").lower().replace("-", "")
    plain = environment.get("TERM", "dumb") in _PLAIN and stream.isatty()
    return BLOCK_GLYPHS if encoding == "utf8" and not plain else ASCII_GLYPHS
