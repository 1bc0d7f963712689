"""torchdata's StatefulDataLoader. --resume: after half of the first epoch another loader goes on from its state."""

import os

import numpy
import torch
from measuring import Measurement, arguments
from PIL import Image
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader


class Pictures(Dataset):
    def __init__(self, root):
        self.image_paths = [
            os.path.join(folder, name) for folder, _, names in sorted(os.walk(root)) for name in sorted(names)
        ]

    def __len__(self):
        return len(self.image_paths)

    def __getitem__(self, index):
        with open(self.image_paths[index], "rb") as file:
            return torch.from_numpy(numpy.array(Image.open(file).convert("RGB"))), index


def main():
    options = arguments(resume=False)
    torch.manual_seed(options.seed)
    dataset = Pictures(os.path.join(options.data, "train"))

    def loader():
        return StatefulDataLoader(dataset, options.batch_size, shuffle=True, num_workers=options.workers)

    measured = Measurement(options)
    current = loader()
    for epoch in measured.epochs():
        for number, (images, labels) in enumerate(measured.waited(current)):
            measured.saw((images, labels))
            measured.compute(len(labels))
            if options.resume and epoch == 0 and number == len(current) // 2:
                break
        if options.resume and epoch == 0:
            state = current.state_dict()
            current = loader()
            current.load_state_dict(state)
            for images, labels in measured.waited(current):
                measured.saw((images, labels))
                measured.compute(len(labels))
    measured.saw(torch.rand(1))
    measured.finish()


if __name__ == "__main__":
    main()
