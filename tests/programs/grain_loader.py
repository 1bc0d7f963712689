"""grain: a MapDataset over files of ArrayRecord, or over pictures (--files), shuffled, and read by its threads."""

import glob
import io

import grain
import numpy
from measuring import Measurement, arguments
from PIL import Image


class Files:
    """A random access source: the bytes of each picture."""

    def __init__(self, pattern):
        self.paths = sorted(glob.glob(pattern))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file:
            return file.read()


def decoded(data):
    start = data.index(b"\xff\xd8\xff")
    return numpy.array(Image.open(io.BytesIO(data[start:])).convert("RGB"))


def main():
    options = arguments(files=False)
    if options.files:
        source = Files(f"{options.data}/train/*/*.jpg")
    else:
        source = grain.sources.ArrayRecordDataSource(sorted(glob.glob(f"{options.data}/*.array_record")))
    dataset = grain.MapDataset.source(source).seed(options.seed).shuffle()
    measured = Measurement(options)
    for epoch in measured.epochs():
        order = dataset if epoch == 0 else grain.MapDataset.source(source).seed(options.seed + epoch).shuffle()
        reading = grain.ReadOptions(num_threads=4, prefetch_buffer_size=2 * options.batch_size)
        batches = order.map(decoded).batch(options.batch_size).to_iter_dataset(reading)
        for images in measured.waited(batches):
            measured.saw(images)
            measured.compute(len(images))
    measured.finish()


if __name__ == "__main__":
    main()
