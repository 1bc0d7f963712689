"""An ordinary loop of training and validation, which a test runs as a job.

train_and_validate.py DIRECTORY listed|hidden --epochs COUNT [ranks N] [hold FILE] [exit STATUS]

listed: the dataset lists its files; hidden: nothing says them but what is opened. ranks: so many processes train, as a
launcher starts them. hold: before it ends, it says so, and waits until that file is there. It prints how many bytes it
has read.

A real job runs longer than its helper takes to start, so each process waits until its helper knows all: after the first
epoch, from which on a loader may be read ahead, and in the end.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time

from torch.utils.data import DataLoader, Dataset

TRAIN, VALIDATION = 320, 32


def name(number):
    return hashlib.blake2b(str(number).encode(), digest_size=8).hexdigest()


class Listed(Dataset):
    def __init__(self, root, first, count):
        self.samples = [f"{root}/{name(number)}" for number in range(first, first + count)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        with open(self.samples[index], "rb") as file:
            return len(file.read())


class Hidden(Dataset):
    def __init__(self, root, first, count):
        self.root, self.first, self.count = root, first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        with open(f"{self.root}/{name(self.first + index)}", "rb") as file:
            return len(file.read())


def main(root, kind, epochs):
    made = {"listed": Listed, "hidden": Hidden}[kind]
    train = DataLoader(made(root, 0, TRAIN), batch_size=8, shuffle=True, num_workers=2)  # the training loader
    validation = DataLoader(made(root, TRAIN, VALIDATION), batch_size=8)  # the validation loader
    total = 0
    for epoch in range(epochs):
        total += sum(int(batch.sum()) for batch in train)
        total += sum(int(batch.sum()) for batch in validation)
        if epoch in (0, epochs - 1):
            settle((epoch + 1) * (TRAIN + VALIDATION))
    return total


def settle(samples, seconds=60):
    """Wait until the helper has noted so many samples, or so long. Without `cachefs run` nobody notes any."""
    noted = os.path.join(os.environ.get("CACHEFS_RUN", "/no/such"), f"{os.getpid()}.json")
    deadline = time.monotonic() + seconds
    while os.path.isdir(os.path.dirname(noted)) and time.monotonic() < deadline:
        with contextlib.suppress(OSError), open(noted) as file:
            if sum(loader["samples"] for loader in json.load(file)["loaders"]) == samples:
                return
        time.sleep(0.05)


if __name__ == "__main__":
    root, kind, _, count, *more = sys.argv[1:]  # DIRECTORY KIND --epochs COUNT
    options = dict(zip(more[::2], more[1::2], strict=True))
    if "ranks" in options:
        ranks = range(int(options["ranks"]))
        command = [sys.executable, __file__, root, kind, "--epochs", count]
        started = [
            subprocess.Popen(command, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(ranks))})
            for rank in ranks
        ]
        sys.exit(max(process.wait() for process in started))
    print(main(root, kind, int(count)), flush=True)
    if "hold" in options:
        print("through", flush=True)
        while not os.path.exists(options["hold"]):
            time.sleep(0.02)
    sys.exit(int(options.get("exit", 0)))
