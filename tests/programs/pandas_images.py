"""The dataset of PyTorch's tutorial "Writing Custom Datasets": a pandas table, and a reader of images by choice.

--reader: `pil`, `torchvision` (torchvision.io.read_image) or `cv2` (cv2.imread); the last two open files in C.
"""

import os

import numpy
import pandas
import torch
from measuring import Measurement, arguments
from PIL import Image
from torch.utils.data import DataLoader, Dataset


def reader_of(name):
    """A function that reads the picture at a path."""
    if name == "torchvision":
        from torchvision.io import decode_image

        return decode_image
    if name == "cv2":
        import cv2

        return lambda path: torch.from_numpy(cv2.cvtColor(cv2.imread(path), cv2.COLOR_BGR2RGB)).permute(2, 0, 1)
    return lambda path: torch.from_numpy(numpy.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)


class CustomImageDataset(Dataset):
    def __init__(self, annotations_file, img_dir, reader):
        self.img_labels = pandas.read_csv(annotations_file)
        self.img_dir = img_dir
        self.reader = reader

    def __len__(self):
        return len(self.img_labels)

    def __getitem__(self, idx):
        img_path = os.path.join(self.img_dir, self.img_labels.iloc[idx, 0])
        return self.reader(img_path), self.img_labels.iloc[idx, 1]


def main():
    options = arguments(reader="pil")
    torch.manual_seed(options.seed)
    dataset = CustomImageDataset(f"{options.data}/train.csv", options.data, reader_of(options.reader))
    loader = DataLoader(dataset, batch_size=options.batch_size, shuffle=True, num_workers=options.workers)
    measured = Measurement(options)
    for _ in measured.epochs():
        for images, labels in measured.waited(loader):
            measured.saw((images, labels))
            measured.compute(len(labels))
    measured.saw(torch.rand(1))
    measured.finish()


if __name__ == "__main__":
    main()
