"""Datasets whose files are not those that it seems: a list of which other files are opened, files by chance, files that
depend on the epoch, and an image with a mask by chance."""

import os
import random

import numpy
import torch
from measuring import Measurement, arguments
from PIL import Image
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    """A quarter of the pictures are samples; the others are what may be opened in their place."""

    epoch = 0

    def __init__(self, folder, how):
        names = sorted(os.listdir(folder))
        count = len(names) // 4
        self.folder, self.how = folder, how
        self.names, self.others = names[:count], names[count:]
        if how == "listed":
            self.files = [os.path.join(folder, name) for name in self.names]

    def __len__(self):
        return len(self.names)

    def chosen(self, index):
        other = random.choice(self.others)
        if self.how == "listed":
            return [other]
        if self.how == "chance":
            return [random.choice((self.names[index], other))]
        if self.how == "pairs":
            return [self.names[index], other]
        return [self.others[(index * 3 + self.epoch) % len(self.others)] if self.epoch else self.names[index]]

    def __getitem__(self, index):
        opened = [Image.open(os.path.join(self.folder, name)).convert("RGB") for name in self.chosen(index)]
        return torch.stack([torch.from_numpy(numpy.array(picture)).permute(2, 0, 1) for picture in opened])


def main():
    options = arguments(how="listed")
    torch.manual_seed(options.seed)
    dataset = Pictures(f"{options.data}/images", options.how)
    loader = DataLoader(dataset, batch_size=options.batch_size, shuffle=True, num_workers=options.workers)
    measured = Measurement(options)
    for dataset.epoch in measured.epochs():
        for images in measured.waited(loader):
            measured.saw(images)
            measured.compute(len(images))
    measured.finish()


if __name__ == "__main__":
    main()
