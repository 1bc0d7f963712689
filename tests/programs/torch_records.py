"""TFRecord files in torch: an IterableDataset whose workers read shards from beginning to end, as such packages do."""

import glob
import io
import random
import struct

import numpy
import torch
from measuring import Measurement, arguments
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def records_of(path):
    """The records of a TFRecord file: a length, its checksum, the data, its checksum."""
    with open(path, "rb") as file:
        while head := file.read(12):
            (length,) = struct.unpack("<Q", head[:8])
            yield file.read(length)
            file.read(4)


class Records(IterableDataset):
    def __init__(self, pattern, seed):
        self.shards = sorted(glob.glob(pattern))
        self.seed = seed
        self.epoch = 0

    def __iter__(self):
        shards = list(self.shards)
        random.Random(self.seed + self.epoch).shuffle(shards)
        worker = get_worker_info()
        for path in shards[worker.id :: worker.num_workers] if worker else shards:
            for record in records_of(path):
                # The picture is the one long field of the Example, and a JPEG says itself where it begins.
                picture = Image.open(io.BytesIO(record[record.index(b"\xff\xd8\xff") :])).convert("RGB")
                yield torch.from_numpy(numpy.array(picture))


def main():
    options = arguments()
    torch.manual_seed(options.seed)
    dataset = Records(f"{options.data}/*.tfrecord", options.seed)
    loader = DataLoader(dataset, batch_size=options.batch_size, num_workers=options.workers)
    measured = Measurement(options)
    for epoch in measured.epochs():
        dataset.epoch = epoch
        for images in measured.waited(loader):
            measured.saw(images)
            measured.compute(len(images))
    measured.finish()


if __name__ == "__main__":
    main()
