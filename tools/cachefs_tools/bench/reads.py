"""Warm reads through the mount beside the local disk, and reads that the memory tier answers.

warm: every page is in the kernel, so no request reaches the mount process; tier: the kernel's pages are dropped before
each pass, so that each file is one FUSE request answered out of the memory tier.
"""

import os
import random
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachefs.messages import Empty, Warmup
from cachefs.rpc import STATUS, WARMUP, DaemonClient
from cachefs_tools.bench.hotread import HotRead, compile_hotread
from cachefs_tools.bench.node import dataset_node
from cachefs_tools.scratch_node import mounted

DIRECTORIES = 40
ROUNDS_IN_TURN = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """files of *size* bytes each, read *rounds* times."""

    files: int
    size: int
    rounds: int


def measure(work: Path, shape: Shape) -> dict[str, Any]:
    source, mount = work / "native", work / "mount"
    names = write_files(source, shape)
    hotread = compile_hotread(work, names)
    with dataset_node(work, source, memory=2 * shape.files * (shape.size + 8192) + (256 << 20)) as (client, socket):
        for _ in client.stream(WARMUP, Warmup(dataset="bench")):
            pass
        with mounted("bench", mount, socket, work / "mount.log"):
            subprocess.run(["find", mount, "-type", "f"], check=True, stdout=subprocess.DEVNULL)
            tier = tier_passes(client, hotread, mount, names)
            load_pages_alike((source, mount), names)
            before = requests(client)
            warm = {f"{procs}_readers": in_turns(hotread, source, mount, shape.rounds, procs) for procs in (1, 2)}
            return {"files": shape.files, "size": shape.size, "tier": tier, "warm": warm,
                    "warm_fuse_requests": requests(client) - before}  # fmt: skip


def write_files(directory: Path, shape: Shape) -> list[str]:
    rng = random.Random(0)
    names = [f"class{number % DIRECTORIES:02}/{number:06}.bin" for number in range(shape.files)]
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(shape.size))
    return names


def in_turns(hotread: HotRead, native: Path, mount: Path, rounds: int, procs: int) -> dict[str, Any]:
    """Medians over all rounds, the two trees taking turns."""
    speed: dict[Path, list[float]] = {native: [], mount: []}
    for root in (native, mount):
        hotread.run(root, procs=procs)
    for _ in range(-(-rounds // ROUNDS_IN_TURN)):
        for root, speeds in speed.items():
            speeds += [line["files_per_s"] for line in hotread.run(root, procs=procs, rounds=ROUNDS_IN_TURN)]
    native_speed, mount_speed = (statistics.median(speeds) for speeds in speed.values())
    return {"native_files_per_s": round(native_speed), "mount_files_per_s": round(mount_speed),
            "ratio": round(mount_speed / native_speed, 3)}  # fmt: skip


def tier_passes(client: DaemonClient, hotread: HotRead, mount: Path, names: list[str]) -> dict[str, Any]:
    speeds = []
    before = requests(client)
    for _ in range(ROUNDS_IN_TURN):
        forget_pages(mount, names)
        speeds += [line["files_per_s"] for line in hotread.run(mount)]
    sent = requests(client) - before
    return {"files_per_s": round(statistics.median(speeds)),
            "fuse_requests_per_file": sent / (ROUNDS_IN_TURN * len(names))}  # fmt: skip


def load_pages_alike(roots: tuple[Path, ...], names: list[str]) -> None:
    """Cache all trees anew, file by file in turn, so that their pages lie alike in physical memory.

    What lies where decides more than the file system: on one machine the ratio was 0.74 beside a tree that had just
    been written (large folios) and 1.16 beside one that had been read from disk hours before.
    """
    # Dirty pages are not dropped.
    os.sync()
    for root in roots:
        forget_pages(root, names)
    for name in names:
        for root in roots:
            (root / name).read_bytes()


def forget_pages(mount: Path, names: list[str]) -> None:
    for name in names:
        fd = os.open(mount / name, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def requests(client: DaemonClient) -> int:
    """FUSE requests the mount has had, once its report of them has come."""
    time.sleep(2.5)
    return sum(mount.counters["requests"] for mount in client.call(STATUS, Empty()).mounts)
