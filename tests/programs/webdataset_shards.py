"""WebDataset: shards in random order, split among workers, a shuffle buffer, and batches."""

import glob

import torch
import webdataset as wds
from measuring import Measurement, arguments


def main():
    options = arguments()
    torch.manual_seed(options.seed)
    urls = sorted(glob.glob(f"{options.data}/train-*.tar"))
    dataset = (
        wds.WebDataset(
            urls, shardshuffle=len(urls), detshuffle=True, seed=options.seed, nodesplitter=wds.split_by_node,
            workersplitter=wds.split_by_worker,
        )
        .shuffle(100, seed=options.seed)
        .decode("torchrgb8")
        .to_tuple("jpg", "cls")
        .batched(options.batch_size)
    )  # fmt: skip
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=options.workers)
    measured = Measurement(options)
    for _ in measured.epochs():
        for images, labels in measured.waited(loader):
            measured.saw((images, labels))
            measured.compute(len(labels))
    measured.finish()


if __name__ == "__main__":
    main()
