"""Metadata at native speed: a repeated find(1), and mounting a snapshot of a million entries."""

import os
import statistics
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import Any

import psutil

from cachefs.messages import Empty
from cachefs.rpc import STATUS
from cachefs_bench.lab.scratch_node import DATASET, NodeSettings, TierSettings, run_directory_node
from cachefs_tools.child_programs import mount_dataset

FILES_PER_DIRECTORY = 1000
TURNS = 5
SETTINGS = NodeSettings(memory=TierSettings(256 << 20), ssd=TierSettings(0))


def measure(work: Path, files: int, entries: int) -> dict[str, Any]:
    """Return the figures as a JSON-serialisable document. *work* is an empty directory."""
    return {"find": measure_find(work, files), "mount": measure_mount(work, entries)}


def measure_find(work: Path, files: int) -> dict[str, Any]:
    """Measure find(1) over a mounted tree of *files* files, and over the same tree on the local disk, in turns."""
    source, mount = work / "native", work / "mount"
    write_empty_files(source, files)
    with (
        run_directory_node(work, source, SETTINGS) as node,
        mount_dataset(DATASET, mount, node.socket, work / "mount.log"),
    ):
        first = time_find(mount)
        time_find(source)
        native, ours = zip(*((time_find(source), time_find(mount)) for _ in range(TURNS)), strict=True)
    return {"files": files, "first_seconds": first, "native_seconds": statistics.median(native),
            "mount_seconds": statistics.median(ours),
            "ratio": round(statistics.median(ours) / statistics.median(native), 3)}  # fmt: skip


def measure_mount(work: Path, entries: int) -> dict[str, Any]:
    """Run mount.cachefs as a user does: measures the seconds until the command returns, and the memory of the process
    it leaves."""
    source, mount = work / "large", work / "large-mount"
    directory = work / "large-node"
    directory.mkdir()
    mount.mkdir()
    write_empty_files(source, entries)
    with run_directory_node(directory, source, SETTINGS) as node:
        command = Path(sysconfig.get_path("scripts"), "mount.cachefs")
        start = time.perf_counter()
        subprocess.run([command, DATASET, mount, "-o", f"socket={node.socket}"], check=True)
        seconds = time.perf_counter() - start
        try:
            os.listdir(mount)
            (view,) = node.client.call(STATUS, Empty()).mounts
            memory = psutil.Process(view.pid).memory_info().rss
        finally:
            subprocess.run(["umount", mount], check=True)
    return {"entries": entries, "seconds": round(seconds, 3), "resident_mb": round(memory / 1e6)}


def write_empty_files(directory: Path, files: int) -> None:
    """Write sparse files of up to 3 KB. find(1) sees their sizes, and the disk holds no data."""
    for start in range(0, files, FILES_PER_DIRECTORY):
        parent = directory / f"{start // FILES_PER_DIRECTORY:04}"
        parent.mkdir(parents=True)
        for number in range(min(FILES_PER_DIRECTORY, files - start)):
            fd = os.open(parent / f"{number:04}.bin", os.O_CREAT | os.O_WRONLY)
            os.ftruncate(fd, 3 * number)
            os.close(fd)


def time_find(top: Path) -> float:
    """Return the seconds that find(1) takes to check the size of every file below *top*."""
    start = time.perf_counter()
    subprocess.run(["find", top, "-type", "f", "-size", "+1"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start
