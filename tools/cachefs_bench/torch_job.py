"""A typical training script: an image folder, a DistributedSampler, a DataLoader with workers.

The script does not know cachefs. It measures its reads and checks the bytes only for the benchmark.
"""

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from cachefs_bench.job_samples import list_samples, parse_arguments, read_sample
from cachefs_tools.training_loop import TrainingBatch, train


class ImageFolder(Dataset[tuple[torch.Tensor, bool, int]]):
    """Items are ((begin of the read, its seconds), whether the bytes were right, class number)."""

    def __init__(self, root: str, keep_pages: bool) -> None:
        self.samples = list_samples(root)
        self._keep_pages = keep_pages

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, bool, int]:
        path, label = self.samples[index]
        begin, seconds, right = read_sample(path, index, self._keep_pages)
        return torch.tensor([begin, seconds], dtype=torch.float64), right, label


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    dataset = ImageFolder(options.data, options.keep_pages)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=1, rank=0, seed=options.seed)
    loader = DataLoader(
        dataset, options.batch_size, sampler=sampler, num_workers=options.workers,
        prefetch_factor=options.prefetch if options.workers else None, persistent_workers=options.workers > 0,
    )  # fmt: skip

    def load(epoch: int) -> Any:
        sampler.set_epoch(epoch)
        for reads, right, _ in loader:
            yield TrainingBatch(reads[:, 0].tolist(), reads[:, 1].tolist(), len(right) - int(right.sum()))

    train(load, options)


if __name__ == "__main__":
    main()
