"""One rank of a job that trains with torch, as people write one: a dataset that lists its files, a DistributedSampler
whose epoch is set, and a DataLoader with workers. It runs under `cachefs run`, and does not know of cachefs.

It obeys the words and says the lines of `cachefs_tools.lab.reader`. What was read is dropped from the page cache, so
the next read of it reaches the mount.
"""

import os
import time
from dataclasses import asdict
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from cachefs_tools.lab.reader import LONG, EpochResult, Trouble, arguments, content, epochs_asked_for, say
from cachefs_tools.sample_data import is_sample, sample_name

BATCH: Final = 8
# Seconds that a job which was held up makes up for.
_BEHIND: Final = 1.0
Read = tuple[int, float, float, int, str]


class Files(Dataset[Read]):
    """A read for each sample: its number, when it began, its seconds, its bytes, and what was wrong with it."""

    def __init__(self, root: str, numbers: range) -> None:
        self.samples = [f"{root}/{sample_name(number)}" for number in numbers]
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Read:
        begin, number = time.monotonic(), self._numbers[index]
        try:
            data = content(self.samples[index])
        except OSError as error:
            return number, begin, time.monotonic() - begin, 0, error.strerror or "error"
        seconds = time.monotonic() - begin
        return number, begin, seconds, len(data), "" if is_sample(data, number) else "wrong"


def read_epoch(loader: DataLoader[Any], epoch: int, rate: float) -> None:
    """Read an epoch at so many samples a second, and say what came of it."""
    result = EpochResult(epoch, time.monotonic())
    due, said = result.begin, 0.0
    for batch in loader:
        for read in batch:
            _count(result, *read)
        now = time.monotonic()
        due = max(due + len(batch) / rate, now - _BEHIND)
        if now - said > 1.0:
            said = now
            say({"at": [epoch, result.reads]})
        time.sleep(max(0.0, due - now))
    result.end = time.monotonic()
    say({"epoch": result.as_line()})


def _count(result: EpochResult, number: int, begin: float, seconds: float, size: int, problem: str) -> None:
    result.add(seconds, size)
    result.wrong += problem == "wrong"
    result.errors += problem not in ("", "wrong")
    kind = "" if not problem and seconds <= LONG else "long" if not problem else "wrong" if not size else "error"
    if kind:
        say({"trouble": asdict(Trouble(kind, begin, seconds, number, problem))})


def main() -> None:
    given = arguments().parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(given.rank)
    dataset = Files(given.root, range(given.files))
    sampler: DistributedSampler[Read] = DistributedSampler(
        dataset, num_replicas=given.replicas, rank=given.rank, seed=given.seed
    )
    loader = DataLoader(dataset, BATCH, sampler=sampler, num_workers=given.threads, collate_fn=list)
    os.listdir(given.root)
    say({"ready": True})
    for epoch in epochs_asked_for(given.first, given.epochs):
        sampler.set_epoch(epoch)
        read_epoch(loader, epoch, given.rate)


if __name__ == "__main__":
    main()
