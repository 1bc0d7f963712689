"""Compares warm reads through the mount with the local disk, and measures reads from the memory tier.

In the warm passes every page is in the kernel, so no request reaches the mount process. They are made by a program in C
(hotread.c), and by Python in the way of training code (cachefs_tools.trial.pyread), alone and under `cachefs run`.
Before each pass over the memory tier the kernel's pages are dropped, so each file is one FUSE request to that tier.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachefs.errors import CachefsError
from cachefs.messages import Empty, WarmupRequest
from cachefs.rpc import STATUS, WARMUP, DaemonClient
from cachefs.run import command_environment
from cachefs_bench.hotread import HotRead, compile_hotread
from cachefs_bench.lab.scratch_node import DATASET, NodeSettings, TierSettings, run_directory_node
from cachefs_tools.child_programs import mount_dataset
from cachefs_tools.kernel_pages import drop_pages, load_pages_interleaved
from cachefs_tools.trial import pyread

PYREAD = Path(pyread.__file__)
DIRECTORIES = 40
ROUNDS_IN_TURN = 5


@dataclass(frozen=True, slots=True)
class WarmReadLoad:
    """The files to read, and how often."""

    files: int
    size: int  # bytes of each file
    rounds: int  # passes over each tree
    # Interpreters for reads in the way of training code.
    pythons: tuple[str, ...] = (sys.executable,)


def measure(work: Path, load: WarmReadLoad) -> dict[str, Any]:
    """Return the figures as a JSON-serialisable document. *work* is an empty directory."""
    source, mount = work / "native", work / "mount"
    names = write_files(source, load)
    hotread = compile_hotread(work, names)
    settings = NodeSettings(TierSettings(2 * load.files * (load.size + 8192) + (256 << 20)), TierSettings(0))
    with run_directory_node(work, source, settings) as node:
        client = node.client
        for _ in client.stream_responses(WARMUP, WarmupRequest(dataset=DATASET)):
            pass
        with mount_dataset(DATASET, mount, node.socket, work / "mount.log"):
            subprocess.run(["find", mount, "-type", "f", "-size", "+1"], check=True, stdout=subprocess.DEVNULL)
            tier = measure_tier(client, hotread, mount, names)
            load_pages_interleaved((source, mount), names)
            before = count_requests(client)
            warm = {f"{procs}_readers": compare_trees(hotread, source, mount, load.rounds, procs) for procs in (1, 2)}
            python = {each: compare_python_reads(each, hotread.listing, source, mount) for each in load.pythons}
            return {"files": load.files, "size": load.size, "tier": tier, "warm": warm, "python": python,
                    "warm_fuse_requests": count_requests(client) - before,
                    "warm_ioctls": count_ioctls(client)}  # fmt: skip


def write_files(directory: Path, load: WarmReadLoad) -> list[str]:
    """Write files with random content. Returns their paths relative to *directory*."""
    rng = random.Random(0)
    names = [f"class{number % DIRECTORIES:02}/{number:06}.bin" for number in range(load.files)]
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(load.size))
    return names


def compare_trees(hotread: HotRead, native: Path, mount: Path, rounds: int, procs: int) -> dict[str, Any]:
    """Read the two trees in turns, with *procs* processes. The figures are medians over all rounds."""
    speed: dict[Path, list[float]] = {native: [], mount: []}
    for root in (native, mount):
        hotread.run(root, procs=procs)
    for _ in range(-(-rounds // ROUNDS_IN_TURN)):
        for root, speeds in speed.items():
            speeds += [line["files_per_s"] for line in hotread.run(root, procs=procs, rounds=ROUNDS_IN_TURN)]
    native_speed, mount_speed = (statistics.median(speeds) for speeds in speed.values())
    return {"native_files_per_s": round(native_speed), "mount_files_per_s": round(mount_speed),
            "ratio": round(mount_speed / native_speed, 3)}  # fmt: skip


def compare_python_reads(python: str, listing: Path, native: Path, mount: Path) -> dict[str, Any]:
    """Return microseconds per file below each tree, and their ratio, for each way in which Python programs read."""
    command = [python, str(PYREAD), str(listing), str(ROUNDS_IN_TURN), str(native), str(mount)]
    under_run = command_environment(os.environ, command, "bench", None)
    measured = {"alone": run_pyread(command, None), "cachefs_run": run_pyread(command, under_run)}
    return {
        how: {
            reading: {"native_us": round(theirs, 1), "mount_us": round(ours, 1), "ratio": round(theirs / ours, 3)}
            for reading, (theirs, ours) in readings.items()
        }
        for how, readings in measured.items()
    }


def run_pyread(command: list[str], variables: dict[str, str] | None) -> dict[str, tuple[float, float]]:
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CachefsError(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        raise CachefsError(f"{command[0]} {PYREAD.name} failed: {done.stderr.strip()}")
    readings: dict[str, tuple[float, float]] = json.loads(done.stdout)
    return readings


def measure_tier(client: DaemonClient, hotread: HotRead, mount: Path, names: list[str]) -> dict[str, Any]:
    """Read the mount several times with one process, each time without its pages in the kernel."""
    speeds = []
    before = count_requests(client)
    for _ in range(ROUNDS_IN_TURN):
        drop_pages(mount / name for name in names)
        speeds += [line["files_per_s"] for line in hotread.run(mount)]
    sent = count_requests(client) - before
    return {"files_per_s": round(statistics.median(speeds)),
            "fuse_requests_per_file": sent / (ROUNDS_IN_TURN * len(names))}  # fmt: skip


def count_requests(client: DaemonClient) -> int:
    """Return the number of FUSE requests of the mount, after waiting for its last report."""
    time.sleep(2.5)
    return sum(mount.counters["requests"] for mount in client.call(STATUS, Empty()).mounts)


def count_ioctls(client: DaemonClient) -> int:
    """Return the number of ioctl requests that the mount has reported so far."""
    return sum(mount.counters["ioctl"] for mount in client.call(STATUS, Empty()).mounts)
