"""A typical training script for `cachefs-bench refetch`: reads whole files in an order of its own.

It does not know cachefs. It writes the order of its samples to a file, from which the least possible number of fetches
is computed.
"""

import argparse
import glob
import json
import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler


class IndexedFiles(Dataset[int]):
    """Item *i* is *i*, after file *i* has been read."""

    def __init__(self, root: str, seconds: float, *, drop: bool) -> None:
        self.files = sorted(glob.glob(f"{root}/*/*.bin"))
        self._seconds = seconds
        self._drop = drop

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> int:
        time.sleep(self._seconds)
        with open(self.files[index], "rb") as file:
            data = file.read()
            if self._drop:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if int.from_bytes(data[:8], "little") != index:
            raise SystemExit(f"{self.files[index]} has other bytes than it should")
        return index


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("report", type=Path)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--drop", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    dataset = IndexedFiles(args.root, max(1, args.workers) / args.rate, drop=args.drop)
    distributed: DistributedSampler[int] = DistributedSampler(dataset, num_replicas=1, rank=0, seed=args.seed)
    sampler: Sampler[int] = distributed if args.distributed else RandomSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler, num_workers=args.workers)
    orders = []
    for epoch in range(args.epochs):
        distributed.set_epoch(epoch)
        orders.append([index for batch in loader for index in batch.tolist()])
    args.report.write_text(json.dumps(orders))


if __name__ == "__main__":
    main()
