"""Somebody else takes the memory, or fills the file system of a tier: every read is answered all the same."""

import contextlib
import random
import subprocess
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.daemon import Daemon
from tests.mounting import drop_pages, mounted

MIB = 1 << 20
SIZES = {"small": 1000, "pieces": 300_001, "large": 6 * MIB + 17}


@contextlib.contextmanager
def small_tmpfs(directory: Path) -> Iterator[Path]:
    directory.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def fill(ballast: Path) -> None:
    """Take all that the file system has left."""
    with pytest.raises(OSError, match="No space"), ballast.open("wb", buffering=0) as file:
        deque(iter(lambda: file.write(bytes(4096)), 0), maxlen=0)


def test_reads_through_a_mount_go_on_while_no_tier_can_hold_anything(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    content = {name: random.Random(name).randbytes(size) for name, size in SIZES.items()}
    for name, data in content.items():
        (origin / name).write_bytes(data)
    with small_tmpfs(tmp_path / "tmpfs") as memory:
        fill(memory / "somebody else's")
        settings = {"memory": {"dir": str(memory / "tier"), "budget": "12MiB"}, "ssd": {"budget": 0}}
        with Daemon(tmp_path / "node", settings) as daemon:
            daemon.add_dataset("d", f"file://{origin}")
            with mounted(daemon.socket, "d", tmp_path / "m") as mount, ThreadPoolExecutor(8) as pool:
                names = [*content] * 4
                found = pool.map(lambda name: (mount / name).read_bytes(), names)
                assert all(data == content[name] for name, data in zip(names, found, strict=True))
                status = daemon.status()
                assert status.passed_blocks >= len(content)
                assert status.tiers[0].blocks == 0
                # A large block is read piece by piece: not each of them costs the origin a block.
                assert status.fetched_bytes < 4 * sum(SIZES.values())
                # No read has failed. That others have filled the tier is said once somebody looks, every second.
                assert all(error.subject == "memory tier" for error in status.errors)
                full = ("takes no new blocks: ", "has no more room: ")
                assert all(error.message.startswith(full) for error in status.errors)
                (memory / "somebody else's").unlink()
                drop_pages(mount)
                # The tier is looked at every two seconds; until then blocks still pass.
                while daemon.status().tiers[0].blocks == 0:
                    drop_pages(mount)
                    assert (mount / "small").read_bytes() == content["small"]
        assert "Traceback" not in daemon.log.read_text()
