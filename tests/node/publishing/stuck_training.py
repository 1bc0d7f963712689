"""A training that reads files in a shuffled order, all but one.

    stuck_training.py DIRECTORY EPOCHS WORKERS [BUT [GO_ON]]

EPOCHS is their number, or the path of a file that ends the training once it is there. GO_ON is the path of a file:
after each batch the training waits until it is there.
"""

import itertools
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset


class Files(Dataset):  # type: ignore[type-arg]
    """The bytes of all files of a directory."""

    def __init__(self, directory: str, but: str) -> None:
        self.samples = sorted(str(path) for path in Path(directory).iterdir() if path.is_file() and path.name != but)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> int:
        with open(self.samples[number], "rb") as file:
            return len(file.read())


if __name__ == "__main__":
    directory, epochs, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    but, go_on = [*sys.argv[4:], "", ""][:2]
    torch.manual_seed(0)
    loader = DataLoader(Files(directory, but), batch_size=4, shuffle=True, num_workers=workers)
    for epoch in itertools.count():
        if os.path.exists(epochs) if os.path.isabs(epochs) else epoch == int(epochs):
            break
        for _ in loader:
            time.sleep(0.05)
            while go_on and not os.path.exists(go_on):
                time.sleep(0.05)
        print(f"epoch {epoch}", flush=True)
