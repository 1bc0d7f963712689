"""The job of a trial, a process of its own: reads files in a published order, and computes by sleeping.

    python -m cachefs_tools.trial.job < JSON

It prints a line with the number of samples after each batch, and at the end one JSON document per epoch.
"""

import argparse
import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import cachefs
from cachefs_tools.training_loop import TrainingBatch, train

# Batches that each worker reads ahead, like torch's DataLoader.
PREFETCH = 2
_PIECE = 1 << 20
# An epoch that takes this multiple of its computing time is cut short: the share of waiting is known by then.
_MAX_EPOCH_FACTOR = 4.0


def main() -> None:
    spec = json.load(sys.stdin)
    files = [os.fsencode(spec["root"]) + b"/" + bytes.fromhex(path) for path in spec["paths"]]
    workers, batch = max(1, spec["workers"]), spec["batch"]
    publication = cachefs.publish(
        [os.fsdecode(file) for file in files], workers=spec["workers"], batch_size=batch, prefetch=PREFETCH
    )
    orders = [random.Random(number).sample(range(len(files)), len(files)) for number in range(spec["epochs"])]
    for number, order in enumerate(orders):
        publication.order(number, order)
    pool = ThreadPoolExecutor(workers)

    def read_batch(numbers: list[int]) -> TrainingBatch:
        reads = [_read(files[number]) for number in numbers]
        return TrainingBatch([begin for begin, _ in reads], [seconds for _, seconds in reads], 0)

    def load(epoch: int) -> Iterator[TrainingBatch]:
        order, done, ahead = orders[epoch], 0, deque[Future[TrainingBatch]]()
        over = time.monotonic() + _MAX_EPOCH_FACTOR * max(1.0, len(order) / spec["rate"])
        for start in range(0, len(order), batch):
            ahead.append(pool.submit(read_batch, order[start : start + batch]))
            if len(ahead) >= workers * PREFETCH or start + batch >= len(order):
                while ahead and (len(ahead) >= workers * PREFETCH or start + batch >= len(order)):
                    taken = ahead.popleft().result()
                    done += len(taken.seconds)
                    publication.progress(epoch, done)
                    print(done, flush=True)
                    yield taken
            if time.monotonic() > over:
                break
        for future in ahead:
            future.cancel()

    train(load, argparse.Namespace(report=Path(spec["report"]), epochs=spec["epochs"], batches=0, demand=spec["rate"]))
    publication.close()
    # Do not wait for readers that wait for the origin.
    pool.shutdown(wait=False, cancel_futures=True)
    os._exit(0)


def _read(path: bytes) -> tuple[float, float]:
    """Return (begin of the read, its seconds)."""
    begin = time.monotonic()
    buffer = bytearray(_PIECE)  # a shard of many GB need not fit into memory
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return begin, time.monotonic() - begin


if __name__ == "__main__":
    main()
