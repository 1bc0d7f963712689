"""A loader that never ends its workers: its batch sampler repeats for ever, and an epoch is len(loader) batches.

timm and YOLO programs have such loaders; this one is written in their manner.
"""

import os

import numpy
import torch
from measuring import Measurement, arguments
from PIL import Image
from torch.utils.data import DataLoader, Dataset


class Repeat:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class InfiniteLoader(DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


class Pictures(Dataset):
    def __init__(self, root):
        self.im_files = [
            os.path.join(folder, name) for folder, _, names in sorted(os.walk(root)) for name in sorted(names)
        ]

    def __len__(self):
        return len(self.im_files)

    def __getitem__(self, index):
        return torch.from_numpy(numpy.array(Image.open(self.im_files[index]).convert("RGB"))), index


def main():
    options = arguments()
    torch.manual_seed(options.seed)
    dataset = Pictures(os.path.join(options.data, "train"))
    loader = InfiniteLoader(dataset, batch_size=options.batch_size, shuffle=True, num_workers=options.workers)
    measured = Measurement(options)
    for _ in measured.epochs():
        for images, labels in measured.waited(loader):
            measured.saw((images, labels))
            measured.compute(len(labels))
    measured.finish()


if __name__ == "__main__":
    main()
