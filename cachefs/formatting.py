"""Formats counts, lists of names and durations for people."""

from collections.abc import Sequence
from typing import Final

_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def format_count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, such as `1 read` and `1,024 reads`. plural: where it has no regular `s`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_names(names: Sequence[str], limit: int) -> str:
    """Return the first names, and the number of the rest, such as `a, b and 3 more`."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def format_duration(seconds: float) -> str:
    """Return a time in its two largest units, such as `3 h 20 min`; less than a second with a decimal."""
    if 0.05 <= seconds < 1:
        return f"{seconds:.1f} s"
    remainder = max(0, int(seconds))
    parts: list[str] = []
    for length, unit in _UNITS:
        number, remainder = divmod(remainder, length)
        if number or parts or unit == "s":
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2])
