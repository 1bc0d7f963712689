"""Random windows of a file of tokens, as nanoGPT's get_batch takes them."""

import os

import numpy as np
import torch
from measuring import Measurement, arguments


def get_batch(data_dir, block_size, batch_size):
    # Made anew for each batch, as nanoGPT does to avoid a leak.
    data = np.memmap(os.path.join(data_dir, "train.bin"), dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


def main():
    options = arguments(block_size=1024, steps=100)
    torch.manual_seed(options.seed)
    measured = Measurement(options)
    for _ in measured.epochs():
        for _ in range(options.steps):
            with measured.waiting():
                x, y = get_batch(options.data, options.block_size, options.batch_size)
            measured.saw((x, y))
            measured.compute(len(x))
    measured.finish()


if __name__ == "__main__":
    main()
