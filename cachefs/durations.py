"""Parses durations as users write them: `90s`, `5m`, `12h`, `7d`."""

import re
from typing import Final

_UNITS: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_DURATION: Final = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(s|m|min|h|d)\s*", re.ASCII)


def parse_duration(text: str) -> float:
    """Return the duration in seconds, more than 0. Raises ValueError with the expected format."""
    found = _DURATION.fullmatch(text)
    if found is None or not float(found[1]):
        raise ValueError(f"{text[:60]!r} is not a duration such as 90s, 30min, 12h or 7d")
    return float(found[1]) * _UNITS[found[2]]
