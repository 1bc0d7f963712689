"""Hugging Face datasets over files of Parquet.

As a stream (streaming=True) with a shuffle buffer, in a DataLoader; or with --load, which converts all of it first.
"""

import glob

import numpy
import torch
from datasets import load_dataset
from measuring import Measurement, arguments
from torch.utils.data import DataLoader


def tensors(row):
    return {"image": torch.from_numpy(numpy.array(row["image"].convert("RGB"))), "label": row["label"]}


def tensors_of_rows(rows):
    pictures = [torch.from_numpy(numpy.array(each.convert("RGB"))) for each in rows["image"]]
    return {"image": pictures, "label": rows["label"]}


def main():
    options = arguments(load=False)
    torch.manual_seed(options.seed)
    files = sorted(glob.glob(f"{options.data}/*.parquet"))
    measured = Measurement(options)
    loader = None
    for epoch in measured.epochs():
        if loader is None:
            with measured.waiting():
                dataset = load_dataset("parquet", data_files=files, split="train", streaming=not options.load)
            if options.load:
                dataset = dataset.with_transform(tensors_of_rows)
            else:
                dataset = dataset.shuffle(seed=options.seed, buffer_size=100).map(tensors)
            loader = DataLoader(
                dataset, batch_size=options.batch_size, num_workers=options.workers, shuffle=options.load or None
            )
        if not options.load:
            dataset.set_epoch(epoch)
        for batch in measured.waited(loader):
            measured.saw(batch)
            measured.compute(len(batch["label"]))
    measured.saw(torch.rand(1))
    measured.finish()


if __name__ == "__main__":
    main()
