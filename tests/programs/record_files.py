"""Samples of one's own in one large file, read here and there by a shuffling DataLoader.

--format: `hdf5` (h5py, opened in each worker), `lmdb` (the same), or `arrow` (Hugging Face datasets, load_from_disk).
"""

import io

import numpy
import torch
from measuring import Measurement, arguments
from PIL import Image
from torch.utils.data import DataLoader, Dataset


def decoded(data):
    return torch.from_numpy(numpy.array(Image.open(io.BytesIO(data)).convert("RGB")))


class Hdf5Pictures(Dataset):
    def __init__(self, root):
        import h5py

        self.path = f"{root}/train.h5"
        self.file = None
        with h5py.File(self.path, "r") as file:
            self.length = len(file["images"])

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.file is None:
            import h5py

            self.file = h5py.File(self.path, "r")
        return torch.from_numpy(self.file["images"][index]), int(self.file["labels"][index])


class LmdbPictures(Dataset):
    def __init__(self, root):
        self.path = f"{root}/train.lmdb"
        self.environment = None
        with self.open() as environment, environment.begin() as transaction:
            self.length = int(transaction.get(b"length"))

    def open(self):
        import lmdb

        return lmdb.open(self.path, readonly=True, lock=False, readahead=False, meminit=False)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.environment is None:
            self.environment = self.open()
        with self.environment.begin() as transaction:
            value = transaction.get(f"{index:08}".encode())
        return decoded(value[4:]), int.from_bytes(value[:4], "little")


def arrow_pictures(root):
    from datasets import load_from_disk

    def transform(rows):
        pictures = [torch.from_numpy(numpy.array(each.convert("RGB"))) for each in rows["image"]]
        return {"image": pictures, "label": rows["label"]}

    return load_from_disk(f"{root}/train").with_transform(transform)


FORMATS = {"hdf5": Hdf5Pictures, "lmdb": LmdbPictures, "arrow": arrow_pictures}


def main():
    options = arguments(format="hdf5")
    torch.manual_seed(options.seed)
    dataset = FORMATS[options.format](options.data)
    loader = DataLoader(dataset, batch_size=options.batch_size, shuffle=True, num_workers=options.workers)
    measured = Measurement(options)
    for _ in measured.epochs():
        for batch in measured.waited(loader):
            measured.saw(batch)
            measured.compute(len(batch["label"] if isinstance(batch, dict) else batch[1]))
    measured.saw(torch.rand(1))
    measured.finish()


if __name__ == "__main__":
    main()
