"""The training loop of the demo: shuffled epochs, and an accelerator that sleeps for a fixed time per batch.

It is a process of its own. It lists its samples, prints `{"ready": ...}`, and reads an epoch for each line on its
standard input. It prints its progress, and then its measurements: one JSON document per line. An epoch's clock runs
from that input line to the end of the last batch's computing, so it includes all waits for the first batch.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterable
from typing import Any

import numpy

import cachefs
from cachefs_bench.demo.loaders import BatchLoader, BucketSource, DigestBatch, FolderSource
from cachefs_bench.demo.settings import BATCH_SIZE, EPOCHS, SEED


def main() -> None:
    options = _arguments()
    source = (
        BucketSource(options.endpoint, options.data, options.workers)
        if options.endpoint
        else FolderSource(options.data)
    )
    loader = BatchLoader(source, options.workers)
    _print_line({"ready": len(source.names)})
    for epoch in range(EPOCHS):
        if not sys.stdin.readline():
            break
        begin = time.monotonic()
        if options.publish and not epoch and isinstance(source, FolderSource):
            # The only line for cachefs. With PyTorch's DataLoader, `cachefs run` finds all this out by itself.
            cachefs.publish(
                [source.sample_path(name) for name in source.names],
                sampler=cachefs.SamplerSpec(kind="numpy", size=len(source.names), seed=SEED, epochs=EPOCHS),
                workers=options.workers, batch_size=BATCH_SIZE,
            )  # fmt: skip
        order = numpy.random.RandomState(SEED + epoch).permutation(len(source.names)).tolist()
        _train(epoch, begin, loader.read_epoch(order), options.compute)
    loader.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="directory of the dataset; with --endpoint, the name of a bucket")
    parser.add_argument("--endpoint", default="", help="URL of an S3 server")
    parser.add_argument("--publish", action="store_true", help="tell cachefsd what will be read")
    parser.add_argument("--compute", type=float, required=True, help="seconds of computing for each sample")
    parser.add_argument("--workers", type=int, required=True, help="threads that read")
    return parser.parse_args()


def _train(epoch: int, begin: float, batches: Iterable[DigestBatch], compute: float) -> None:
    """Run an epoch, and print its measurements. Times in seconds."""
    digest = hashlib.sha256()
    waited = slowest = 0.0
    samples = size = 0
    requested_at = begin
    for batch in batches:
        wait = time.monotonic() - requested_at
        waited, slowest = waited + wait, max(slowest, wait)
        for one in batch.digests:
            digest.update(one)
        samples, size = samples + len(batch.digests), size + batch.bytes
        time.sleep(len(batch.digests) * compute)
        requested_at = time.monotonic()
        _print_line({"at": {"epoch": epoch, "samples": samples, "seconds": requested_at - begin, "waited": waited}})
    seconds = time.monotonic() - begin
    _print_line({"epoch": {"epoch": epoch, "samples": samples, "bytes": size, "seconds": seconds, "waited": waited,
                    "slowest_wait": slowest, "digest": digest.hexdigest()}})  # fmt: skip


def _print_line(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
