"""The command line of the training jobs of `cachefs-bench train`, and their reads of samples."""

import argparse
import os
import time
from pathlib import Path

from cachefs_bench.sample_data import is_sample


def parse_arguments() -> argparse.Namespace:
    """Parse the command line of a job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="directory of the dataset")
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--prefetch", type=int, required=True, help="batches that each worker reads ahead")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--demand", type=float, required=True, help="samples per second that the accelerator takes")
    parser.add_argument("--batches", type=int, default=0, help="stop after so many batches in all (0: never)")
    parser.add_argument("--keep-pages", action="store_true", help="leave what was read in the kernel's page cache")
    return parser.parse_args()


def list_samples(root: str) -> list[tuple[str, int]]:
    """Return (path, class number) of each sample, in the order of torchvision's ImageFolder."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    return [
        (f"{root}/{name}/{file}", label)
        for label, name in enumerate(classes)
        for file in sorted(os.listdir(f"{root}/{name}"))
    ]


def read_sample(path: str, number: int, keep_pages: bool) -> tuple[float, float, bool]:
    """Read a sample. Returns (when the read began, seconds it took, whether the bytes were right)."""
    begin = time.monotonic()
    with open(path, "rb", buffering=0) as file:
        data = file.read()
        seconds = time.monotonic() - begin
        if not keep_pages:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return begin, seconds, is_sample(data, number)
