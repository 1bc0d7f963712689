"""The loader of the demo's training loop."""

import hashlib
import threading
from pathlib import Path

import pytest

from cachefs_bench.demo.loaders import BatchLoader, FolderSource
from cachefs_bench.demo.settings import BATCH_SIZE, PREFETCH


def folder(root: Path, files: int) -> FolderSource:
    for number in range(files):
        path = root / f"class{number % 3}" / f"{number:03}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([number]) * (number + 1))
    return FolderSource(str(root))


@pytest.mark.parametrize("workers", [1, 5])
def test_batches_come_in_order_whoever_reads_them(tmp_path: Path, workers: int) -> None:
    source = folder(tmp_path, 3 * BATCH_SIZE + 1)
    order = list(reversed(range(3 * BATCH_SIZE + 1)))
    loader = BatchLoader(source, workers)
    batches = list(loader.read_epoch(order))
    loader.close()
    assert [len(batch.digests) for batch in batches] == [BATCH_SIZE] * 3 + [1]
    read = [digest for batch in batches for digest in batch.digests]
    assert read == [hashlib.sha256(source.read_sample(source.names[number])).digest() for number in order]
    assert sum(batch.bytes for batch in batches) == sum(path.stat().st_size for path in tmp_path.rglob("*.bin"))


class _Counting:
    """A dataset that counts what was read."""

    def __init__(self) -> None:
        self.names = [str(number) for number in range(20 * BATCH_SIZE)]
        self.reads = 0
        self._lock = threading.Lock()

    def read_sample(self, name: str) -> bytes:
        with self._lock:
            self.reads += 1
        return b""


def test_no_more_is_read_ahead_than_workers_may(tmp_path: Path) -> None:
    source = _Counting()
    loader = BatchLoader(source, 2)
    batches = loader.read_epoch(range(len(source.names)))
    next(batches)
    loader.close()  # waits for what is being read, and forgets what is only planned
    assert source.reads <= (2 * PREFETCH + 1) * BATCH_SIZE


def test_an_error_of_a_read_ends_the_epoch(tmp_path: Path) -> None:
    source = folder(tmp_path, 4)
    (tmp_path / source.names[2]).unlink()
    loader = BatchLoader(source, 2)
    with pytest.raises(FileNotFoundError):
        list(loader.read_epoch(range(4)))
    loader.close()
