"""Sources of the loop's samples (files, or an S3 client), and the loader that reads some batches ahead."""

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from cachefs_bench.demo.settings import BATCH_SIZE, PREFETCH


class SampleSource(Protocol):
    """A dataset: its samples, and how to read one."""

    @property
    def names(self) -> Sequence[str]:
        """The samples, sorted: paths relative to the dataset."""

    def read_sample(self, name: str) -> bytes:
        """Return the bytes of a sample. Thread-safe."""


class FolderSource:
    """Samples in files, of a mount or a local disk."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.names = sorted(
            os.path.relpath(os.path.join(directory, name), root)
            for directory, _, names in os.walk(root)
            for name in names
        )

    def read_sample(self, name: str) -> bytes:
        """Return the bytes of the file. Raises OSError."""
        with open(self.sample_path(name), "rb") as file:
            return file.read()

    def sample_path(self, name: str) -> str:
        """Return the path of a sample."""
        return f"{self._root}/{name}"


class BucketSource:
    """Samples in objects, read with one GetObject each by botocore, the client inside boto3. Credentials come from the
    environment, as usual."""

    def __init__(self, endpoint: str, bucket: str, connections: int) -> None:
        # Imported here, since readers of files do not need it.
        from botocore.config import Config
        from botocore.session import Session

        config = Config(max_pool_connections=connections, s3={"addressing_style": "path"})
        self._client = Session().create_client("s3", "us-east-1", endpoint_url=endpoint, config=config)
        self._bucket = bucket
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        self.names = sorted(entry["Key"] for page in pages for entry in page.get("Contents", ()))

    def read_sample(self, name: str) -> bytes:
        """Return the bytes of the object. Raises botocore's errors."""
        body: bytes = self._client.get_object(Bucket=self._bucket, Key=name)["Body"].read()
        return body


@dataclass(frozen=True, slots=True)
class DigestBatch:
    """A batch of the loader."""

    digests: list[bytes]  # SHA-256 of each sample, in order
    bytes: int


class BatchLoader:
    """Reads batches in threads, a bounded number ahead, and returns them in order, like PyTorch's DataLoader."""

    def __init__(self, source: SampleSource, workers: int) -> None:
        self._source = source
        self._pool = ThreadPoolExecutor(workers)
        self._ahead = workers * PREFETCH

    def read_epoch(self, order: Sequence[int]) -> Iterator[DigestBatch]:
        """Yield the batches of an epoch with samples in that order."""
        waiting: deque[Future[DigestBatch]] = deque()
        starts = iter(range(0, len(order), BATCH_SIZE))
        for start in starts:
            waiting.append(self._pool.submit(self._read, order[start : start + BATCH_SIZE]))
            if len(waiting) == self._ahead:
                break
        while waiting:
            batch = waiting.popleft().result()
            if (start := next(starts, -1)) >= 0:
                waiting.append(self._pool.submit(self._read, order[start : start + BATCH_SIZE]))
            yield batch

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _read(self, numbers: Sequence[int]) -> DigestBatch:
        names = self._source.names
        samples = [self._source.read_sample(names[number]) for number in numbers]
        return DigestBatch([hashlib.sha256(sample).digest() for sample in samples], sum(map(len, samples)))
