"""Pairs for a siamese network: each sample is a picture and another one, drawn at random of the same class or not."""

import random
from pathlib import Path

import numpy
import torch
from measuring import Measurement, arguments
from PIL import Image
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, root):
        self.paths = sorted(Path(root).glob("*/*.jpg"))
        self.labels = [path.parent.name for path in self.paths]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        same = random.random() < 0.5
        while True:
            other = random.randrange(len(self.paths))
            if (self.labels[other] == self.labels[index]) == same:
                break
        return self.load(index), self.load(other), int(same)

    def load(self, index):
        return torch.from_numpy(numpy.array(Image.open(self.paths[index]).convert("RGB")))


def main():
    options = arguments()
    torch.manual_seed(options.seed)
    loader = DataLoader(
        Pairs(f"{options.data}/train"), options.batch_size, shuffle=True, num_workers=options.workers, drop_last=True
    )
    measured = Measurement(options)
    for _ in measured.epochs():
        for first, second, same in measured.waited(loader):
            measured.saw((first, second, same))
            measured.compute(2 * len(same))
    measured.saw(torch.rand(1))
    measured.finish()


if __name__ == "__main__":
    main()
