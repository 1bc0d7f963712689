"""A medical dataset of one's own: each case is a folder with an .npz file, found by listing when the program starts."""

from pathlib import Path

import numpy
import torch
from measuring import Measurement, arguments
from torch.utils.data import DataLoader, Dataset


class Cases(Dataset):
    def __init__(self, root):
        self.root = Path(root)
        self.cases = sorted(folder.name for folder in self.root.iterdir())

    def __len__(self):
        return len(self.cases)

    def __getitem__(self, index):
        with numpy.load(self.root / self.cases[index] / "volume.npz") as volume:
            return torch.from_numpy(volume["image"]), torch.from_numpy(volume["mask"])


def main():
    options = arguments()
    torch.manual_seed(options.seed)
    loader = DataLoader(Cases(options.data), options.batch_size, shuffle=True, num_workers=options.workers)
    measured = Measurement(options)
    for _ in measured.epochs():
        for images, masks in measured.waited(loader):
            measured.saw((images, masks))
            measured.compute(len(images))
    measured.saw(torch.rand(1))
    measured.finish()


if __name__ == "__main__":
    main()
