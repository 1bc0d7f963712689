"""mosaicml-streaming: a StreamingDataset over shards that lie in a directory."""

import io

import numpy
import torch
from measuring import Measurement, arguments
from PIL import Image
from streaming import StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import DataLoader


class Pictures(StreamingDataset):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        picture = Image.open(io.BytesIO(sample["image"])).convert("RGB")
        return torch.from_numpy(numpy.array(picture)), sample["label"]


def main():
    options = arguments()
    torch.manual_seed(options.seed)
    clean_stale_shared_memory()
    dataset = Pictures(
        local=f"{options.data}/train", shuffle=True, shuffle_seed=options.seed, batch_size=options.batch_size,
        num_canonical_nodes=1,
    )  # fmt: skip
    loader = DataLoader(dataset, batch_size=options.batch_size, num_workers=options.workers)
    measured = Measurement(options)
    for _ in measured.epochs():
        for images, labels in measured.waited(loader):
            measured.saw((images, labels))
            measured.compute(len(labels))
    measured.finish()


if __name__ == "__main__":
    main()
