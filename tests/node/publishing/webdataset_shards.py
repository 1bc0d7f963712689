"""`webdataset_shards.py DIRECTORY WORKERS`: goes through the shards of a directory with WebDataset, for some epochs.

Prints the shards of each epoch in the order in which their samples came (see test_shards.py).
"""

import glob
import json
import sys

import webdataset as wds
from told import wait_until_told

EPOCHS = 2


def main() -> None:
    root, workers = sys.argv[1], int(sys.argv[2])
    urls = sorted(glob.glob(f"{root}/*.tar"))
    dataset = wds.WebDataset(urls, shardshuffle=100, detshuffle=True, seed=5).to_tuple("__url__", "txt")
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    for epoch in range(EPOCHS):
        print(json.dumps([url for url, _ in loader]))
        wait_until_told("JobEpoch", epoch)


if __name__ == "__main__":
    main()
