"""Sizes for tests that run small in every test run, and large in `make soak`."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ODD = ("plain", "with space", "snow \N{SNOWMAN}", "%41+&?#=", "quote'\"", "back\\slash", "tab\there", "-dash", "dot.")


@dataclass(frozen=True)
class Scale:
    """How much a test reads."""

    files: int
    largest: int  # bytes of the largest file
    large: int  # number of files of about that size


SMALL = Scale(files=300, largest=9_000_000, large=2)
FULL = Scale(files=20_000, largest=50_000_000, large=12)
FULL_MARKS = [pytest.mark.soak, pytest.mark.timeout(3000)]
SCALES = [pytest.param(SMALL, id="small"), pytest.param(FULL, id="full", marks=FULL_MARKS)]


def mixed_files(scale: Scale, seed: int = 5) -> Iterator[tuple[str, bytes]]:
    """(relative path, content) of each file.

    Some files are empty, some are small, some are large, and some end near the edge of a page or a block. Many have odd
    names.
    """
    rng = random.Random(seed)
    edges = [0, 1, 4095, 4096, 4097, 131_071, 131_072, 131_073, (4 << 20) - 1, 4 << 20, (4 << 20) + 1]
    for number in range(scale.files):
        if number < scale.large:
            size = scale.largest - number
        elif number < scale.large + len(edges):
            size = edges[number - scale.large]
        else:
            size = int(rng.paretovariate(0.9) * 2000) % 200_000 if number % 50 else 0
        yield (
            f"{ODD[number % len(ODD)]}/level {number % 7}/{number:06} {ODD[(number // 9) % len(ODD)]}",
            rng.randbytes(size),
        )


def write_tree(top: Path, scale: Scale) -> None:
    """Write the files of `mixed_files` below *top*."""
    for name, content in mixed_files(scale):
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
