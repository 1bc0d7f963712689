"""A dataset of one's own: a table of identifiers and classes beside a folder of images, opened by PIL."""

import csv
import os

import numpy
import torch
from measuring import Measurement, arguments
from PIL import Image
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, table, folder):
        with open(table, newline="") as rows:
            self.rows = list(csv.DictReader(rows))
        self.folder = folder

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        picture = Image.open(os.path.join(self.folder, row["id"] + ".jpg")).convert("RGB")
        return torch.from_numpy(numpy.array(picture)).permute(2, 0, 1), int(row["label"])


def main():
    options = arguments()
    torch.manual_seed(options.seed)
    dataset = Pictures(f"{options.data}/labels.csv", f"{options.data}/images")
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
