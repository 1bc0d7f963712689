"""One rank of a typical torch job: a dataset that lists its files, a DistributedSampler and a DataLoader with workers.
Runs under `cachefs run`, without knowing cachefs.

It follows the protocol of `cachefs_bench.lab.reader`. Pages that were read are dropped, so the next read of the sample
reaches the mount.
"""

import argparse
import os
import time
from dataclasses import asdict
from typing import Any, Final, get_args

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from cachefs_bench.lab.reader import (
    LONG_SECONDS,
    EpochResult,
    ReadProblem,
    ScriptKind,
    argument_parser,
    read_and_drop,
    requested_epochs,
    write_line,
)
from cachefs_bench.sample_data import is_sample, sample_name

BATCH_SIZE: Final = 8
# Seconds of delay that a job catches up on.
_BEHIND: Final = 1.0
Read = tuple[int, float, float, int, str]


class SampleFiles(Dataset[Read]):
    """Items are (sample number, begin of its read, seconds, bytes, problem)."""

    def __init__(self, root: str, numbers: range) -> None:
        self.samples = [f"{root}/{sample_name(number)}" for number in numbers]
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Read:
        begin, number = time.monotonic(), self._numbers[index]
        try:
            data = read_and_drop(self.samples[index])
        except OSError as error:
            return number, begin, time.monotonic() - begin, 0, error.strerror or "error"
        seconds = time.monotonic() - begin
        return number, begin, seconds, len(data), "" if is_sample(data, number) else "wrong"


def read_loader(loader: DataLoader[Any], result: EpochResult, rate: float) -> None:
    """Read all of a loader, at *rate* samples per second."""
    due, reported_at = time.monotonic(), 0.0
    for batch in loader:
        for one in batch:
            _add_read(result, *one)
        now = time.monotonic()
        due = max(due + len(batch) / rate, now - _BEHIND)
        if now - reported_at > 1.0:
            reported_at = now
            write_line({"at": [result.epoch, result.reads, time.monotonic()]})
        time.sleep(max(0.0, due - now))


def _add_read(result: EpochResult, number: int, begin: float, seconds: float, size: int, problem: str) -> None:
    result.add_read(seconds, size)
    result.wrong += problem == "wrong"
    result.errors += problem not in ("", "wrong")
    kind = (
        "" if not problem and seconds <= LONG_SECONDS else "long" if not problem else "wrong" if not size else "error"
    )
    if kind:
        write_line({"trouble": asdict(ReadProblem(kind, begin, seconds, number, problem))})


def loaders(args: argparse.Namespace) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
    """Return the loaders of the training, and of the validation, which has the last twentieth of the files, if there is
    one."""
    validation_files = args.files // 20 if args.script == "validation" else 0
    parts = range(args.files - validation_files), range(args.files - validation_files, args.files)
    made: list[DataLoader[Any]] = []
    for part in parts:
        if len(part):
            dataset = SampleFiles(args.root, part)
            sampler: DistributedSampler[Read] = DistributedSampler(
                dataset, num_replicas=args.replicas, rank=args.rank, seed=args.seed, shuffle=not made
            )
            made.append(DataLoader(dataset, BATCH_SIZE, sampler=sampler, num_workers=args.threads, collate_fn=list))
    return made[0], made[1] if len(made) > 1 else None


def main() -> None:
    parser = argument_parser()
    parser.add_argument("--script", choices=get_args(ScriptKind), default="set-epoch")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.rank)
    training, validation = loaders(args)
    os.listdir(args.root)
    write_line({"ready": True})
    for epoch in requested_epochs(args.first, args.epochs):
        if args.script != "no-set-epoch":
            assert isinstance(training.sampler, DistributedSampler)
            training.sampler.set_epoch(epoch)
        result = EpochResult(epoch, time.monotonic())
        for loader in filter(None, (training, validation)):
            read_loader(loader, result, args.rate)
        result.end = time.monotonic()
        write_line({"epoch": result.as_line()})


if __name__ == "__main__":
    main()
