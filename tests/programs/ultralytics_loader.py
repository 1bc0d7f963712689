"""ultralytics' InfiniteDataLoader over its kind of classification dataset, whose pictures are read by OpenCV."""

from pathlib import Path

import cv2
import torch
import torchvision
from measuring import Measurement, arguments
from ultralytics.data.build import InfiniteDataLoader


class ClassificationDataset:
    """As ultralytics.data.ClassificationDataset, but for its look at all pictures and its cache beside the data."""

    def __init__(self, root):
        self.base = torchvision.datasets.ImageFolder(root=root)
        self.samples = [[*sample, Path(sample[0]).with_suffix(".npy"), None] for sample in self.base.samples]
        self.transforms = torchvision.transforms.PILToTensor()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        f, j, _, im = self.samples[i]
        if im is None:
            im = cv2.imread(f)
        im = torch.from_numpy(cv2.cvtColor(im, cv2.COLOR_BGR2RGB)).permute(2, 0, 1)
        return {"img": im, "cls": j}


def main():
    options = arguments()
    torch.manual_seed(options.seed)
    generator = torch.Generator()
    generator.manual_seed(6148914691236517205)
    loader = InfiniteDataLoader(
        ClassificationDataset(f"{options.data}/train"), batch_size=options.batch_size, shuffle=True,
        num_workers=options.workers, generator=generator,
    )  # fmt: skip
    measured = Measurement(options)
    for _ in measured.epochs():
        for batch in measured.waited(loader):
            measured.saw(batch)
            measured.compute(len(batch["cls"]))
    measured.finish()


if __name__ == "__main__":
    main()
