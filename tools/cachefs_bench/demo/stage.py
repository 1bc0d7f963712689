"""The environment of the training loop: a dataset behind a slow object store, and new nodes that cache it.

The dataset has the usual shape of an image folder: one directory per class, files as large as photographs.
"""

import os
import random
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from cachefs.messages import DatasetAddRequest, OriginOptions
from cachefs.rpc import DATASET_ADD
from cachefs.socket_path import SOCKET_VARIABLE
from cachefs_bench.demo.display import DemoDisplay
from cachefs_bench.demo.settings import STORE_LIMITS, DemoSettings
from cachefs_bench.lab.host import LOOPBACK
from cachefs_bench.lab.node import LabNode
from cachefs_bench.lab.scratch import MEMORY_PREFIX, scratch_directory
from cachefs_bench.lab.scratch_node import (
    SCRATCH_CREDENTIALS,
    NodeSettings,
    TierSettings,
    environment_with,
    memory_directory,
    run_s3_server,
)
from cachefs_bench.lab.throttle import Throttle, run_throttle
from cachefs_tools.cachectl.display import size
from cachefs_tools.child_programs import program_path

CLASSES: Final = 40
BUCKET: Final = "demo-bucket"
DATASET: Final = "demo"
BLOCK_SIZE: Final = 1 << 20
# Share of the dataset. The rest goes to the SSD tier, so both tiers are used.
MEMORY_SHARE: Final = 0.75
_SHARED_MEMORY: Final = Path("/dev/shm")


def generate(directory: Path, files: int, mean_size: int, seed: int = 0) -> int:
    """Write files of mean_size/2 to 3*mean_size/2 bytes. Returns their total bytes. The same arguments always give the
    same files."""
    numbers = random.Random(seed)
    for number in range(CLASSES):
        (directory / f"class{number:03}").mkdir(parents=True)
    total = 0
    for number in range(files):
        size = numbers.randint(mean_size // 2, mean_size + mean_size // 2)
        (directory / f"class{number % CLASSES:03}" / f"image{number:06}.jpg").write_bytes(numbers.randbytes(size))
        total += size
    return total


@dataclass(frozen=True, slots=True)
class DemoStage:
    """A dataset on the local disk, and the same behind the object store."""

    settings: DemoSettings
    work: Path
    local_dataset: Path  # the dataset on the local disk
    total: int  # bytes of it
    store: Throttle

    def node_settings(self) -> NodeSettings:
        """Return settings with room for the dataset and some blocks that the daemon requires, and defaults
        otherwise."""
        memory = TierSettings(int(MEMORY_SHARE * self.total) + (16 << 20))
        return NodeSettings(memory, TierSettings(self.total + (64 << 20)), BLOCK_SIZE)

    def environment(self, node: LabNode | None = None) -> dict[str, str]:
        """Return the variables of a training loop: those of a shell, the daemon's socket, and the store's
        credentials."""
        ours: Mapping[str, str] = {SOCKET_VARIABLE: str(node.socket)} if node is not None else {}
        return {**environment_with(SCRATCH_CREDENTIALS), **ours, "PYTHONUNBUFFERED": "1"}

    def training_command(self, node: LabNode | None = None, *options: str) -> list[str]:
        """Return the command of a training loop that reads the node's mount; None: the local disk."""
        return self._loop(str(self.local_dataset if node is None else node.mountpoint), *options)

    def store_command(self) -> list[str]:
        """Return the command of a training loop that reads the object store itself."""
        return self._loop(BUCKET, "--endpoint", self.store.endpoint)

    def cachefs_run_command(self, node: LabNode) -> list[str]:
        """Return the command of a training loop under `cachefs run`."""
        front = [program_path("cachefs"), "run", "--job", DATASET, "--socket", str(node.socket), "--"]
        return [*front, *self.training_command(node, "--publish")]

    def _start(self, node: LabNode) -> None:
        node.start(self.node_settings())
        options = OriginOptions(endpoint_url=self.store.endpoint, region="us-east-1", addressing_style="path")
        for _ in node.client.stream_responses(DATASET_ADD, DatasetAddRequest(DATASET, f"s3://{BUCKET}", options)):
            pass
        node.mount(DATASET, ())

    def _loop(self, data: str, *options: str) -> list[str]:
        return [
            sys.executable, "-m", "cachefs_bench.demo.training", data, "--compute", str(self.settings.compute),
            "--workers", str(self.settings.workers), *options,
        ]  # fmt: skip

    @contextmanager
    def run_node(self, name: str, display: DemoDisplay) -> Iterator[LabNode]:
        """Run a new node with empty tiers, and the dataset listed and mounted."""
        work = self.work / name
        work.mkdir()
        with _memory(self.total, work) as memory:
            node = LabNode(name, LOOPBACK, work, memory)
            try:
                with display.show_work("starting a new node"):
                    self._start(node)
                yield node
            finally:
                node.kill()
        shutil.rmtree(work)


@contextmanager
def prepare_stage(settings: DemoSettings, display: DemoDisplay) -> Iterator[DemoStage]:
    """Make the dataset, and run the object store. Everything is removed at the end."""
    with ExitStack() as stack:
        work = stack.enter_context(scratch_directory("cachefs-demo-"))
        source = work / "buckets" / BUCKET
        display.show_step(f"generating {settings.files:,} files in {source}")
        total = generate(source, settings.files, settings.file_size)
        os.sync()  # otherwise the disk writes during the reads, and dirty pages cannot be dropped
        display.show_step(
            f"starting an S3 server that answers like a distant one: after {1e3 * STORE_LIMITS.latency:.0f} ms (p99"
            f" {1e3 * STORE_LIMITS.latency_p99:.0f} ms), with {STORE_LIMITS.bandwidth / 1e6:.0f} MB/s"
        )
        server = stack.enter_context(run_s3_server(source.parent, work / "s3.log"))
        store = stack.enter_context(run_throttle(server, STORE_LIMITS, work / "throttle.log"))
        display.show_step(
            f"{size(total)}; one loop with {1e3 * settings.compute:g} ms of computing per sample, fed in four ways"
        )
        yield DemoStage(settings, work, source, total, store)


def file_system_type(path: Path) -> str:
    """Return the type of the file system of *path*, such as `ext4`."""
    above = [one for one in psutil.disk_partitions(all=True) if path.is_relative_to(one.mountpoint)]
    return str(max(above, key=lambda one: len(one.mountpoint)).fstype)


@contextmanager
def _memory(total: int, work: Path) -> Iterator[Path]:
    """Create a directory for the memory tier: in /dev/shm, or in *work* if that is too small (64 MB in containers)."""
    if not _SHARED_MEMORY.is_dir() or shutil.disk_usage(_SHARED_MEMORY).free < 2 * total + (64 << 20):
        yield work / "memory"
        return
    with memory_directory(MEMORY_PREFIX) as directory:
        yield directory
