"""Generates a dataset in the usual shape of an image folder: one directory per class, files as large as photographs."""

import random
from pathlib import Path
from typing import Final

CLASSES: Final = 40


def generate(directory: Path, files: int, mean_size: int, seed: int = 0) -> int:
    """Write files of mean_size/2 to 3*mean_size/2 bytes. Returns their total bytes. The same arguments always give the
    same files."""
    numbers = random.Random(seed)
    for number in range(CLASSES):
        (directory / f"class{number:03}").mkdir(parents=True)
    total = 0
    for number in range(files):
        size = numbers.randint(mean_size // 2, mean_size + mean_size // 2)
        (directory / f"class{number % CLASSES:03}" / f"image{number:06}.jpg").write_bytes(numbers.randbytes(size))
        total += size
    return total
