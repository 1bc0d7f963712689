"""Accelerate's cv_example: a dataset with a list of file names, and loaders that `prepare` makes anew.

--seedable asks for its SeedableRandomSampler; --resume skips the first half of the first epoch, as after a checkpoint.
"""

import glob
import os
import re

import numpy
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from measuring import Measurement, arguments
from PIL import Image
from torch.utils.data import DataLoader, Dataset


def extract_label(fname):
    return int(re.search(r"n(\d+)", os.path.dirname(fname)).groups()[0])


class PicturesDataset(Dataset):
    def __init__(self, file_names):
        self.file_names = file_names

    def __len__(self):
        return len(self.file_names)

    def __getitem__(self, idx):
        fname = self.file_names[idx]
        image = Image.open(fname).convert("RGB")
        return {"image": torch.from_numpy(numpy.array(image)), "label": extract_label(fname)}


def main():
    options = arguments(seedable=False, resume=False)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=options.seedable)
    )
    set_seed(options.seed)
    file_names = sorted(glob.glob(os.path.join(options.data, "train", "*", "*.jpg")))
    loader = DataLoader(
        PicturesDataset(file_names), shuffle=True, batch_size=options.batch_size, num_workers=options.workers
    )
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    measured = Measurement(options)
    for epoch in measured.epochs():
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        active = loader
        if options.resume and epoch == 0:
            active = accelerator.skip_first_batches(loader, len(loader) // 2)
        for batch in measured.waited(active):
            measured.saw(batch)
            measured.compute(len(batch["label"]))
    measured.saw(torch.rand(1))
    measured.finish()


if __name__ == "__main__":
    main()
