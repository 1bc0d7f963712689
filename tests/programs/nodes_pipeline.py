"""A pipeline of torchdata.nodes: a sampler, a mapper with workers, batches, and a prefetcher."""

import os

import numpy
import torch
from measuring import Measurement, arguments
from PIL import Image
from torch.utils.data import RandomSampler, default_collate
from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper, Prefetcher, SamplerWrapper


class Pictures:
    def __init__(self, root):
        self.paths = [
            os.path.join(folder, name) for folder, _, names in sorted(os.walk(root)) for name in sorted(names)
        ]

    def __len__(self):
        return len(self.paths)

    def __call__(self, index):
        return torch.from_numpy(numpy.array(Image.open(self.paths[index]).convert("RGB"))), index


def main():
    options = arguments(method="thread")
    torch.manual_seed(options.seed)
    pictures = Pictures(os.path.join(options.data, "train"))
    node = SamplerWrapper(RandomSampler(pictures))
    node = ParallelMapper(node, map_fn=pictures, num_workers=options.workers, method=options.method)
    node = Mapper(Batcher(node, options.batch_size), default_collate)
    loader = Loader(Prefetcher(node, prefetch_factor=2))
    measured = Measurement(options)
    for _ in measured.epochs():
        for images, labels in measured.waited(loader):
            measured.saw((images, labels))
            measured.compute(len(labels))
    measured.finish()


if __name__ == "__main__":
    main()
