"""The dataset and the loader of timm's train.py, without a GPU.

--multi-epochs is train.py's --use-multi-epochs-loader.
"""

import torch
from measuring import Measurement, arguments
from timm.data import create_dataset, create_loader
from timm.utils import random_seed


def main():
    options = arguments(multi_epochs=False)
    random_seed(options.seed, 0)
    dataset = create_dataset("", root=options.data, split="train", is_training=True, batch_size=options.batch_size)
    loader = create_loader(
        dataset,
        input_size=(3, 128, 128),
        batch_size=options.batch_size,
        is_training=True,
        use_prefetcher=False,
        num_workers=options.workers,
        use_multi_epochs_loader=options.multi_epochs,
        device=torch.device("cpu"),
        worker_seeding="all",
    )
    measured = Measurement(options)
    for _ in measured.epochs():
        for images, labels in measured.waited(loader):
            measured.saw((images, labels))
            measured.compute(len(labels))
    measured.saw(torch.rand(1))
    measured.finish()


if __name__ == "__main__":
    main()
