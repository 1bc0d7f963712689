"""What every program of this directory shares: its arguments, and the line that it prints in the end.

    options = arguments()
    measured = Measurement(options)
    for epoch in measured.epochs():
        for batch in measured.waited(loader):   # the time in next() is what the program waits for data
            measured.saw(batch)
            measured.compute(len(batch))        # an accelerator that only sleeps
    measured.finish()

The line is one JSON object: `digest` of all that was read, in its order, and for each epoch when it began and ended
(seconds of CLOCK_MONOTONIC), when its first step did, how long the program waited for data, and how many samples it
got.
"""

import argparse
import hashlib
import json
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

Item = TypeVar("Item")


def arguments(**own: Any) -> argparse.Namespace:
    """The command line: what all programs have, and options of the program's own with their default values."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="directory of the dataset")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="of a loader that has any")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--hold", default="", help="EPOCH:STEP:FILE: before that step, wait until the file exists")
    parser.add_argument("--milliseconds", type=float, default=4.0, help="that computing takes for each sample")
    for name, value in own.items():
        kind = {"action": "store_true"} if value is False else {"type": type(value)}
        parser.add_argument("--" + name.replace("_", "-"), default=value, **kind)
    options = parser.parse_args()
    random.seed(options.seed)
    return options


class Measurement:
    """What one run of a program has read, and how long it waited for it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._digest = hashlib.blake2b(digest_size=16)
        self._epochs: list[dict[str, float]] = []
        self._steps = 0  # of the epoch

    def epochs(self) -> Iterator[int]:
        """The numbers of the epochs, each while it runs."""
        for number in range(self._options.epochs):
            self.begin()
            yield number
            self.end()

    def begin(self) -> None:
        """An epoch begins."""
        self._steps = 0
        now = time.monotonic()
        self._epochs.append({"begin": now, "first": now, "end": 0.0, "wait": 0.0, "samples": 0})

    def end(self) -> None:
        """The epoch ends."""
        self._epochs[-1]["end"] = time.monotonic()

    def waited(self, batches: Iterable[Item]) -> Iterator[Item]:
        """The batches. The time that each takes to come is waited for data."""
        with self.waiting():
            iterator = iter(batches)
        while True:
            with self.waiting():
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits for data and does nothing else."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add_wait(time.perf_counter() - began)

    def add_wait(self, seconds: float) -> None:
        """The program has waited for data; for libraries that have the loop themselves."""
        self._epochs[-1]["wait"] += seconds

    def compute(self, samples: int) -> None:
        """Take the time that a step with so many samples takes."""
        if not self._steps:
            self._epochs[-1]["first"] = time.monotonic()
        self._epochs[-1]["samples"] += samples
        self._steps += 1
        time.sleep(samples * self._options.milliseconds / 1e3)
        epoch, step, path = self._options.hold.split(":", 2) if self._options.hold else (0, 0, "")
        while path and (int(epoch), int(step)) == (len(self._epochs), self._steps) and not os.path.exists(path):
            time.sleep(0.01)

    def saw(self, value: Any) -> None:
        """Make a value, or what is in a tensor, an array, a list or a mapping, part of the digest."""
        if isinstance(value, Mapping):
            for key in sorted(value):
                self.saw(value[key])
        elif isinstance(value, (list, tuple)):
            for each in value:
                self.saw(each)
        elif isinstance(value, (bytes, bytearray, memoryview)):
            self._digest.update(value)
        elif hasattr(value, "numpy") or hasattr(value, "tobytes"):
            self._digest.update((value.numpy() if hasattr(value, "numpy") else value).tobytes())
        else:
            self._digest.update(repr(value).encode())

    def finish(self) -> None:
        """Print the line. What the generators would draw next is part of the digest."""
        self.saw(random.random())
        print(json.dumps({"digest": self._digest.hexdigest(), "epochs": self._epochs}), flush=True)
