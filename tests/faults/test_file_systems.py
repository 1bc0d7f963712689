"""The SSD tier on the file systems that people have: what `du` and `df` say, and what a start finds again."""

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachefs.messages import Selection
from cachefs.rpc import EVICT
from tests.blockstore import disk_usage
from tests.daemon import Daemon

MIB = 1 << 20
BUDGET = 12 * MIB
# The smallest that mkfs.xfs makes is 300 MiB. The file takes what is written to it only.
IMAGE = 400 * MIB
SETTINGS = {
    "daemon": {"policy": "lru"},
    "memory": {"budget": "6MiB", "segment_size": "5MiB"},
    "ssd": {"budget": BUDGET, "segment_size": "5MiB"},
}


@contextmanager
def mounted_disk(kind: str, directory: Path, *options: str) -> Iterator[Path]:
    """A new file system of its own on *directory*. Needs xfsprogs, btrfs-progs, e2fsprogs."""
    image = directory.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(IMAGE)
    subprocess.run([f"mkfs.{kind}", "-q", *options, image], check=True, capture_output=True)
    directory.mkdir()
    subprocess.run(["mount", "-o", "loop", image, directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def taken(disk: Path) -> int:
    """Bytes that are not free, as `df` counts them once everything is written."""
    subprocess.run(["sync", "-f", disk], check=True)
    found = os.statvfs(disk)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_an_ssd_tier_takes_its_budget_of_a_real_disk_and_survives_a_kill(tmp_path: Path, kind: str) -> None:
    draw = random.Random(kind)
    origin = tmp_path / "origin"
    origin.mkdir()
    content = {f"{number:03}": draw.randbytes(draw.randrange(50_000, 200_000)) for number in range(150)}
    for name, data in content.items():
        (origin / name).write_bytes(data)
    with mounted_disk(kind, tmp_path / "disk") as disk:
        daemon = Daemon(tmp_path / "node", SETTINGS)
        daemon.ssd = disk / "ssd"
        before = taken(disk)
        with daemon:
            view = daemon.add_dataset("d", f"file://{origin}")
            for name in content:
                daemon.read(view, name)
            daemon.client.call(EVICT, Selection("d", [name.encode() for name in content if int(name) % 5]))
            for name in list(content)[:75]:
                daemon.read(view, name)
            daemon.client.call(EVICT, Selection("d", [name.encode() for name in content if int(name) % 5]))
            kept = daemon.status().tiers[1]
            assert kept.blocks > 10
            # Not more than is said, and what was evicted is free for others.
            assert disk_usage(daemon.ssd) <= kept.used <= BUDGET
            assert taken(disk) - before <= kept.used + 2 * MIB
            daemon.kill9()
            daemon.start()
            again = daemon.status().tiers[1]
            assert (again.blocks, again.problem) == (kept.blocks, "")
            for name, data in content.items():
                assert daemon.read(view, name) == data
            assert disk_usage(daemon.ssd) <= daemon.status().tiers[1].used <= BUDGET


def test_a_disk_that_frees_more_than_a_page_at_a_time_is_refused(tmp_path: Path) -> None:
    with mounted_disk("ext4", tmp_path / "disk", "-O", "bigalloc", "-C", "65536") as disk:
        daemon = Daemon(tmp_path / "node", SETTINGS)
        daemon.ssd = disk / "ssd"
        with pytest.raises(AssertionError, match="frees no less than 65536 bytes at a time"), daemon:
            pass
