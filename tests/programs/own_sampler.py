"""Samplers and batch samplers of one's own, as papers have them.

--sampler: `balanced` yields samples of all classes in turn; `batches` is a batch sampler that groups samples of like
size, as for detection; `numpy` gives a permutation of numpy. --start-method: of the workers.
"""

import csv
import os

import numpy
import torch
from measuring import Measurement, arguments
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler


class Pictures(Dataset):
    def __init__(self, root):
        with open(os.path.join(root, "train.csv"), newline="") as rows:
            table = list(csv.DictReader(rows))
        self.root = root
        self.img_files = [row["path"] for row in table]
        self.labels = [int(row["label"]) for row in table]

    def __len__(self):
        return len(self.img_files)

    def __getitem__(self, index):
        picture = Image.open(os.path.join(self.root, self.img_files[index])).convert("RGB")
        return torch.from_numpy(numpy.array(picture)), self.labels[index]


class BalancedSampler(Sampler):
    """As many samples of each class as there are of the smallest, classes in turn."""

    def __init__(self, labels):
        self.by_class = [numpy.flatnonzero(numpy.equal(labels, each)) for each in numpy.unique(labels)]
        self.length = min(map(len, self.by_class))

    def __len__(self):
        return self.length * len(self.by_class)

    def __iter__(self):
        chosen = [numpy.random.permutation(samples)[: self.length] for samples in self.by_class]
        for row in zip(*chosen, strict=True):
            for sample in row:
                yield int(sample)


class GroupedBatches(Sampler):
    """Batches of neighbours, in an order that is drawn as they are needed."""

    def __init__(self, samples, batch_size):
        self.samples, self.batch_size = samples, batch_size

    def __len__(self):
        return self.samples // self.batch_size

    def __iter__(self):
        left = list(range(len(self)))
        while left:
            batch = left.pop(int(torch.randint(len(left), (1,))))
            start = batch * self.batch_size
            yield list(range(start, start + self.batch_size))


class NumpySampler(Sampler):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __iter__(self):
        return iter(numpy.random.permutation(self.samples))


def main():
    options = arguments(sampler="balanced", start_method="")
    torch.manual_seed(options.seed)
    numpy.random.seed(options.seed)
    dataset = Pictures(options.data)
    workers = {"num_workers": options.workers, "multiprocessing_context": options.start_method or None}
    if options.sampler == "batches":
        batches = GroupedBatches(len(dataset), options.batch_size)
        loader = DataLoader(dataset, batch_sampler=batches, **workers)
    else:
        sampler = NumpySampler(len(dataset)) if options.sampler == "numpy" else BalancedSampler(dataset.labels)
        loader = DataLoader(dataset, options.batch_size, sampler=sampler, **workers)
    measured = Measurement(options)
    for _ in measured.epochs():
        for images, labels in measured.waited(loader):
            measured.saw((images, labels))
            measured.compute(len(labels))
    measured.saw((torch.rand(1), numpy.random.random()))
    measured.finish()


if __name__ == "__main__":
    main()
