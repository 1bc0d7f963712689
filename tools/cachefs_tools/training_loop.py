"""The training loop of jobs that measure: an accelerator that only sleeps, and a report of its waits.

The report is a file of JSON lines, one per epoch, so a stopped job leaves what it has done. All times are seconds of
CLOCK_MONOTONIC, which is the same for all processes of a machine.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

# Seconds. A longer read has waited for something outside this machine's memory.
SLOW_READ: Final = 0.01

Read = tuple[float, float]  # when the read began, and seconds it took


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A loader's report of one batch."""

    begins: Sequence[float]  # begin of each sample's read
    seconds: Sequence[float]  # duration of each sample's read
    damaged: int  # samples whose bytes were wrong


@dataclass(slots=True)
class EpochReport:
    """A job's report of one epoch."""

    epoch: int
    begin: float  # when the job asked for the first batch
    end: float = 0  # when the last batch was computed
    samples: int = 0
    damaged: int = 0  # samples whose bytes were wrong
    batches: list[float] = field(default_factory=list)  # when each batch came
    waits: list[float] = field(default_factory=list)  # seconds that the accelerator waited for each batch
    begins: list[float] = field(default_factory=list)  # when the read of each sample began
    read_p50: float = 0  # seconds of one sample's read, the median
    read_p99: float = 0  # likewise, the 99th percentile
    read_longest: float = 0  # likewise, the longest
    slow_reads: int = 0  # reads that took longer than SLOW_READ
    later_reads: int = 0  # reads that began after the job had its first batch
    slow_later: int = 0  # those that took longer than SLOW_READ


def read_report(path: Path) -> list[EpochReport]:
    """Return the epochs in the report *path* of a job."""
    return [EpochReport(**json.loads(line)) for line in path.read_text().splitlines()]


def train(load: Callable[[int], Iterable[TrainingBatch]], options: argparse.Namespace) -> None:
    """Run the job and report each epoch. load(epoch) returns the batches of an epoch."""
    left = options.batches or -1
    first_batch = 0.0
    with options.report.open("w") as report:
        for number in range(options.epochs):
            epoch = EpochReport(number, time.monotonic())
            reads, left = _train_epoch(epoch, load(number), options.demand, left)
            first_batch = first_batch or epoch.batches[0]
            _summarize(epoch, reads, first_batch)
            report.write(json.dumps(asdict(epoch)) + "\n")
            report.flush()
            if not left:
                return


def _train_epoch(
    epoch: EpochReport, batches: Iterable[TrainingBatch], demand: float, left: int
) -> tuple[list[Read], int]:
    """Take at most *left* batches, or all if that is negative. Returns all reads, and the number of batches left."""
    reads: list[Read] = []
    requested_at = time.monotonic()
    for batch in batches:
        came = time.monotonic()
        epoch.batches.append(came)
        epoch.waits.append(came - requested_at)
        epoch.samples += len(batch.seconds)
        epoch.damaged += batch.damaged
        reads += zip(batch.begins, batch.seconds, strict=True)
        time.sleep(len(batch.seconds) / demand)
        left -= 1
        if not left:
            break
        requested_at = time.monotonic()
    epoch.end = time.monotonic()
    return reads, left


def _summarize(epoch: EpochReport, reads: Sequence[Read], first_batch: float) -> None:
    seconds = [seconds for _, seconds in reads]
    later = [seconds for begin, seconds in reads if begin > first_batch]
    quantiles = statistics.quantiles(seconds, n=100) if len(reads) > 1 else seconds * 99
    epoch.read_p50, epoch.read_p99, epoch.read_longest = quantiles[49], quantiles[98], max(seconds)
    epoch.begins = [begin for begin, _ in reads]
    epoch.slow_reads = sum(one > SLOW_READ for one in seconds)
    epoch.later_reads, epoch.slow_later = len(later), sum(one > SLOW_READ for one in later)
