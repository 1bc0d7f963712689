"""Parses and formats sizes (`4MiB`, `1.5 GB`, `0`), shares of a total (`25%`) and durations (`90s`, `12h`)."""

import re
from dataclasses import dataclass
from typing import Final

_SECONDS_OF_UNIT: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_DURATION: Final = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(s|m|min|h|d)\s*", re.ASCII)
_UNITS: Final = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 10**3,
    "m": 1 << 20, "mib": 1 << 20, "mb": 10**6,
    "g": 1 << 30, "gib": 1 << 30, "gb": 10**9,
    "t": 1 << 40, "tib": 1 << 40, "tb": 10**12,
}  # fmt: skip
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_PERCENT: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
MAX_SIZE: Final = 1 << 60  # bytes
_STEPS: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def parse_duration(text: str) -> float:
    """Return the duration in seconds, more than 0. Raises ValueError with the expected format."""
    found = _DURATION.fullmatch(text)
    if found is None or not float(found[1]):
        raise ValueError(f"{text[:60]!r} is not a duration such as 90s, 30min, 12h or 7d")
    return float(found[1]) * _SECONDS_OF_UNIT[found[2]]


@dataclass(frozen=True, slots=True)
class SizeSetting:
    """A size in bytes: `size`, or `percent` of a total that is only known later."""

    size: int = 0
    percent: float = 0.0

    def resolve(self, total: int) -> int:
        return int(total * self.percent / 100) if self.percent else self.size

    def __str__(self) -> str:
        return f"{self.percent:g}%" if self.percent else format_size(self.size)


def parse_size(value: object) -> int:
    """Return the bytes of a number or a text. Raises ValueError with the expected format."""
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    size: float = -1
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif found is not None and found[2].lower() in _UNITS:
        size = float(found[1]) * _UNITS[found[2].lower()]
    if size < 0:
        raise ValueError('expected a size such as "4MiB", "1.5GiB" or a number of bytes')
    if size > MAX_SIZE:
        raise ValueError("expected a size of at most 1 EiB")
    return int(size)


def parse_share(value: object) -> SizeSetting:
    """Return a size or a percentage. Raises ValueError with the expected format."""
    if isinstance(value, SizeSetting):
        return value
    found = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    if found is not None:
        percent = float(found[1])
        if percent > 100:
            raise ValueError('expected a percentage up to 100, such as "25%"')
        return SizeSetting(percent=percent)
    try:
        return SizeSetting(size=parse_size(value))
    except ValueError:
        raise ValueError('expected a size such as "8GiB" or a percentage such as "25%"') from None


def format_size(size: int) -> str:
    for unit, name in _STEPS:
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"
