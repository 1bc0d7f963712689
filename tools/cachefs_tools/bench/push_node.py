"""A node that holds a whole dataset, and mounts of it whose pages the kernel has yet to get."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cachefs_daemon.store.segment_writer import span

from cachefs.block import block_count
from cachefs.errors import CachefsError
from cachefs.job_messages import JobName, JobPublish
from cachefs.messages import DatasetAdd, Empty, MountView, Warmup
from cachefs.rpc import DATASET_ADD, JOB_CANCEL, JOB_PUBLISH, STATUS, WARMUP, DaemonClient
from cachefs_tools.bench.reads import forget_pages
from cachefs_tools.scratch_node import daemon, mounted

DATASET: Final = "bench"
TIERS: Final = ("memory", "ssd")
BLOCK_SIZE: Final = 4 << 20
# What a tier that is not meant to hold anything still needs to let blocks pass.
SMALL_TIER: Final = 32 << 20
# A mount reports ten times a second while anything changes.
SETTLE_SECONDS: Final = 0.5
CONFIG: Final = """\
[daemon]
socket = "{socket}"
state_dir = "{work}/state"
block_size = {block_size}

[memory]
dir = "{memory}"
budget = {memory_budget}
segment_size = "16MiB"

[ssd]
dir = "{work}/ssd"
budget = {ssd_budget}
min_free = 0
segment_size = "64MiB"
"""


@dataclass(frozen=True, slots=True)
class PushNode:
    """work: holds its SSD tier, logs and mount points."""

    client: DaemonClient
    socket: Path
    work: Path

    @property
    def ssd(self) -> Path:
        return self.work / "ssd"


@dataclass(frozen=True, slots=True)
class PushMount:
    """A mount, and how to look at it from outside."""

    node: PushNode
    path: Path

    def view(self) -> MountView:
        """Raises CachefsError where it has died."""
        for view in self.node.client.call(STATUS, Empty()).mounts:
            if view.mountpoint == str(self.path) and view.alive:
                return view
        raise CachefsError(f"the mount at {self.path} has died; its log is {self.path}.log")

    def counters(self) -> dict[str, int]:
        """Once all it has done by now is counted."""
        time.sleep(SETTLE_SECONDS)
        return self.view().counters

    def pids(self) -> tuple[int, int]:
        """Of the daemon and of the mount."""
        return self.node.client.call(STATUS, Empty()).pid, self.view().pid


def room_for(files: int, size: int) -> int:
    """Bytes of a tier that holds so many files of so many bytes, an eighth of it being kept for passing blocks."""
    blocks = block_count(size, BLOCK_SIZE)
    return files * blocks * span(min(size, BLOCK_SIZE)) * 8 // 7 + (128 << 20)


@contextmanager
def push_node(work: Path, source: Path, tier: str, room: int) -> Iterator[PushNode]:
    """With all of the directory *source* in its tiers as the dataset `bench`. tier: `memory`, which is then the only
    one, or `ssd`, beside a memory tier of the smallest use; room: its bytes."""
    memory, ssd = (room, 0) if tier == "memory" else (SMALL_TIER, room)
    socket, config = work / "cachefsd.sock", work / "cachefsd.toml"
    directory = Path(tempfile.mkdtemp(prefix="cachefs-bench-", dir="/dev/shm"))
    try:
        config.write_text(
            CONFIG.format(work=work, socket=socket, memory=directory, memory_budget=memory, ssd_budget=ssd,
                          block_size=BLOCK_SIZE)
        )  # fmt: skip
        with daemon(config, socket, work / "cachefsd.log") as client:
            for _ in client.stream(DATASET_ADD, DatasetAdd(name=DATASET, url=f"file://{source}")):
                pass
            warmed = list(client.stream(WARMUP, Warmup(dataset=DATASET)))[-1]
            if warmed.state != "done" or warmed.skipped or warmed.failed:
                raise CachefsError(f"the tiers do not hold all of the dataset: {warmed}")
            yield PushNode(client, socket, work)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def cold_mount(node: PushNode, options: Sequence[str] = ()) -> Iterator[PushMount]:
    """A new mount, of which the kernel knows names and attributes and holds no page; nor of the SSD tier."""
    path = Path(tempfile.mkdtemp(prefix="mount-", dir=node.work)).resolve() / "mnt"
    with mounted(DATASET, path, node.socket, path.with_suffix(".log"), options):
        subprocess.run(["find", path, "-type", "f", "-size", "+1"], check=True, stdout=subprocess.DEVNULL)
        # Dirty pages are not dropped.
        os.sync()
        if node.ssd.exists():
            forget_pages(node.ssd, os.listdir(node.ssd))
        yield PushMount(node, path)


@contextmanager
def published(node: PushNode, *consumers: JobPublish) -> Iterator[None]:
    """The consumers of one job, which is forgotten afterwards."""
    for consumer in consumers:
        node.client.call(JOB_PUBLISH, consumer)
    yield
    node.client.call(JOB_CANCEL, JobName(job=consumers[0].job))


def pushed(before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
    """What the pusher did in between; levels as they are in the end. Empty where nothing is pushed."""
    levels = ("push_held_bytes", "push_budget")
    names = [name for name in after if name.startswith("push_")]
    return {name: after[name] - (0 if name in levels else before.get(name, 0)) for name in names}
