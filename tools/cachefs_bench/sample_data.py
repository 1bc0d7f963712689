"""A dataset with verifiable files: each holds its number and a checksum of its content.

All files have one size, so a capacity in bytes is a capacity in samples. The order by path is the order by number.
"""

import random
import zlib
from pathlib import Path
from typing import Final

PER_CLASS: Final = 100
_POOL: Final = 4 << 20


def sample_name(number: int) -> str:
    """Return the path of a sample, relative to the directory of the dataset."""
    return f"class{number // PER_CLASS:04}/{number:07}.bin"


def write_samples(directory: Path, count: int, size: int) -> None:
    """Write samples 0 to count-1. size: bytes of each file, at least 8."""
    pool = random.Random(0).randbytes(_POOL + size)
    for number in range(count):
        path = directory / sample_name(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        start = number * 4099 % _POOL
        content = number.to_bytes(4, "little") + pool[start : start + size - 8]
        path.write_bytes(content + zlib.crc32(content).to_bytes(4, "little"))


def is_sample(data: bytes | memoryview, number: int) -> bool:
    """Return whether *data* is the whole and undamaged content of sample *number*."""
    named = int.from_bytes(data[:4], "little") == number
    return named and zlib.crc32(data[:-4]) == int.from_bytes(data[-4:], "little")
