"""torchvision's ImageFolder with a shuffling DataLoader, as in the examples of PyTorch."""

import torch
from measuring import Measurement, arguments
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


def main() -> None:
    options = arguments(shuffle_off=False)
    torch.manual_seed(options.seed)
    dataset = datasets.ImageFolder(
        f"{options.data}/train", transforms.Compose([transforms.RandomHorizontalFlip(), transforms.PILToTensor()])
    )
    loader = DataLoader(dataset, options.batch_size, shuffle=not options.shuffle_off, num_workers=options.workers)
    measured = Measurement(options)
    for _ in measured.epochs():
        for images, labels in measured.waited(loader):
            measured.saw((images, labels))
            measured.compute(len(labels))
    measured.saw(torch.rand(1))
    measured.finish()


if __name__ == "__main__":
    main()
