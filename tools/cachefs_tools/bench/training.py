"""The training loop of the benchmark's jobs: an accelerator that only sleeps, and a report of when it had to wait.

The report is a file of JSON lines, one per epoch, so that a job that is stopped leaves what it has done. All times are
CLOCK_MONOTONIC, which all processes of a machine share.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from cachefs_tools.bench.sample_data import is_sample

# A read that takes longer than this has waited for something that is not in this machine's memory.
SLOW_READ: Final = 0.01


Read = tuple[float, float]  # when it began, seconds it took


@dataclass(frozen=True, slots=True)
class Batch:
    """begins, seconds: when each sample's read began, and how long it took; damaged: samples that were not right."""

    begins: Sequence[float]
    seconds: Sequence[float]
    damaged: int


@dataclass(slots=True)
class EpochReport:
    """batches: when each came; waits: seconds the accelerator waited for each; read_p50, read_p99, read_longest:
    seconds of one sample's read; slow_reads: those over SLOW_READ; later_reads, slow_later: those that began when the
    job had its first batch.
    """

    epoch: int
    begin: float
    end: float = 0
    samples: int = 0
    damaged: int = 0
    batches: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    read_p50: float = 0
    read_p99: float = 0
    read_longest: float = 0
    slow_reads: int = 0
    later_reads: int = 0
    slow_later: int = 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="directory of the dataset")
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--prefetch", type=int, required=True, help="batches per worker")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--demand", type=float, required=True, help="samples per second the accelerator takes")
    parser.add_argument("--batches", type=int, default=0, help="stop after so many in all (0: never)")
    parser.add_argument("--keep-pages", action="store_true", help="leave what was read in the kernel's page cache")
    return parser.parse_args()


def list_samples(root: str) -> list[tuple[str, int]]:
    """(path, class number) of each sample, as torchvision's ImageFolder lists them."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    return [
        (f"{root}/{name}/{file}", label)
        for label, name in enumerate(classes)
        for file in sorted(os.listdir(f"{root}/{name}"))
    ]


def read_sample(path: str, number: int, keep_pages: bool) -> tuple[float, float, bool]:
    """(when reading began, seconds it took, whether the bytes were right)."""
    begin = time.monotonic()
    with open(path, "rb", buffering=0) as file:
        data = file.read()
        seconds = time.monotonic() - begin
        if not keep_pages:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return begin, seconds, is_sample(data, number)


def train(load: Callable[[int], Iterable[Batch]], options: argparse.Namespace) -> None:
    """load: the batches of an epoch."""
    left = options.batches or -1
    first_batch = 0.0
    with options.report.open("w") as report:
        for number in range(options.epochs):
            epoch = EpochReport(number, time.monotonic())
            reads, left = _train_epoch(epoch, load(number), options.demand, left)
            first_batch = first_batch or epoch.batches[0]
            _sum_up(epoch, reads, first_batch)
            report.write(json.dumps(asdict(epoch)) + "\n")
            report.flush()
            if not left:
                return


def _train_epoch(epoch: EpochReport, batches: Iterable[Batch], demand: float, left: int) -> tuple[list[Read], int]:
    """At most *left* batches, any number if it is negative; all reads, and how many batches are left then."""
    reads: list[Read] = []
    asked = time.monotonic()
    for batch in batches:
        came = time.monotonic()
        epoch.batches.append(came)
        epoch.waits.append(came - asked)
        epoch.samples += len(batch.seconds)
        epoch.damaged += batch.damaged
        reads += zip(batch.begins, batch.seconds, strict=True)
        time.sleep(len(batch.seconds) / demand)
        left -= 1
        if not left:
            break
        asked = time.monotonic()
    epoch.end = time.monotonic()
    return reads, left


def _sum_up(epoch: EpochReport, reads: Sequence[Read], first_batch: float) -> None:
    seconds = [seconds for _, seconds in reads]
    later = [seconds for begin, seconds in reads if begin > first_batch]
    quantiles = statistics.quantiles(seconds, n=100) if len(reads) > 1 else seconds * 99
    epoch.read_p50, epoch.read_p99, epoch.read_longest = quantiles[49], quantiles[98], max(seconds)
    epoch.slow_reads = sum(one > SLOW_READ for one in seconds)
    epoch.later_reads, epoch.slow_later = len(later), sum(one > SLOW_READ for one in later)
