"""A node that holds a whole dataset, and mounts of it without pages in the kernel.

`measure_processor_time` measures processor seconds of the node's processes. User time is Python's own, system time is
the kernel's.
"""

import os
import resource
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import psutil

from cachefs.block import block_count
from cachefs.errors import CachefsError
from cachefs.job_messages import JobName, JobPublication
from cachefs.messages import Empty, MountView, WarmupRequest
from cachefs.rpc import JOB_CANCEL, JOB_PUBLISH, STATUS, WARMUP
from cachefs_bench.lab.scratch_node import DATASET, NodeSettings, ScratchNode, TierSettings, run_directory_node
from cachefs_daemon.store.segment_writer import span
from cachefs_tools.child_programs import mount_dataset
from cachefs_tools.kernel_pages import drop_pages

# Process name of the pusher.
PUSHER: Final = "pusher"
# Process name -> {"user": seconds, "system": seconds}.
Seconds = dict[str, dict[str, float]]
TIERS: Final = ("memory", "ssd")
BLOCK_SIZE: Final = 4 << 20
# Bytes of a memory tier that is not meant to hold anything. It still needs room for bypass blocks.
SMALL_TIER: Final = 32 << 20
# Seconds between queries until counters settle: a mount reports ten times a second while anything changes.
SETTLE_SECONDS: Final = 0.5
MAX_SETTLE_SECONDS: Final = 10.0


@contextmanager
def measure_processor_time(daemon: int, mount: int) -> Iterator[Seconds]:
    """Account for the block. The dictionary is filled when the block has ended.

    *daemon* and *mount* are process ids. The names are `daemon`, `mount` (all processes of the mount but its pusher),
    `pusher` if there is one, and `reader` (this process and its children that have ended).
    """
    seconds: Seconds = {}
    before = _seconds(daemon, mount)
    yield seconds
    after = _seconds(daemon, mount)
    for (name, kind), value in after.items():
        seconds.setdefault(name, {})[kind] = round(value - before.get((name, kind), 0), 3)


def _seconds(daemon: int, mount: int) -> dict[tuple[str, str], float]:
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    try:
        supervisor = psutil.Process(mount)
        for process in (psutil.Process(daemon), supervisor, *supervisor.children(recursive=True)):
            times = process.cpu_times()
            name = "daemon" if process.pid == daemon else PUSHER if process.name() == PUSHER else "mount"
            found[name, "user"] += times.user
            found[name, "system"] += times.system
    except psutil.NoSuchProcess as error:
        raise CachefsError(f"a process of the node has died: {error}") from None
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        found["reader", "user"] += usage.ru_utime
        found["reader", "system"] += usage.ru_stime
    return found


class PushMode(StrEnum):
    """Whether a mount pushes. The values are keys of the JSON documents."""

    PUSHING = "pushing"
    NOT_PUSHING = "not pushing"


def mount_options(mode: PushMode, budget: str) -> list[str]:
    """Return options of the mount. budget: of the page cache, as `-o` takes it, or empty for the mount's default."""
    if mode == PushMode.NOT_PUSHING:
        return ["no_push"]
    return [f"page_cache_budget={budget}"] if budget else []


@dataclass(frozen=True, slots=True)
class PushMount:
    """A mount, with access to its state from outside."""

    node: ScratchNode
    path: Path

    def mount_view(self) -> MountView:
        """Return the daemon's view of the mount. Raises CachefsError if the mount has died."""
        for view in self.node.client.call(STATUS, Empty()).mounts:
            if view.mountpoint == str(self.path) and view.alive:
                return view
        raise CachefsError(f"the mount at {self.path} has died; its log is {self.path}.log")

    def settled_counters(self) -> dict[str, int]:
        """Return the counters once they have settled."""
        seen: dict[str, int] | None = None
        deadline = time.monotonic() + MAX_SETTLE_SECONDS
        while True:
            time.sleep(SETTLE_SECONDS)
            now = self.mount_view().counters
            if now == seen or time.monotonic() > deadline:
                return now
            seen = now

    def process_ids(self) -> tuple[int, int]:
        """Return the process ids of the daemon and of the mount."""
        return self.node.client.call(STATUS, Empty()).pid, self.mount_view().pid


def tier_budget(files: int, size: int) -> int:
    """Return the bytes of a tier that holds *files* files of *size* bytes. An eighth of a tier is kept for bypass
    blocks."""
    blocks = block_count(size, BLOCK_SIZE)
    return files * blocks * span(min(size, BLOCK_SIZE)) * 8 // 7 + (128 << 20)


@contextmanager
def run_push_node(work: Path, source: Path, tier: str, room: int) -> Iterator[ScratchNode]:
    """Run a node whose tiers hold all of the directory *source*, as the dataset DATASET.

    The tier `memory` has *room* bytes and is then the only one. The tier `ssd` has *room* bytes beside a small memory
    tier. Raises CachefsError if the dataset does not fit.
    """
    memory, ssd = (room, 0) if tier == "memory" else (SMALL_TIER, room)
    settings = NodeSettings(TierSettings(memory, 16 << 20), TierSettings(ssd, 64 << 20), BLOCK_SIZE)
    with run_directory_node(work, source, settings) as node:
        warmed = list(node.client.stream_responses(WARMUP, WarmupRequest(dataset=DATASET)))[-1]
        if warmed.state != "done" or warmed.skipped or warmed.failed:
            raise CachefsError(f"the tiers do not hold all of the dataset: {warmed}")
        yield node


@contextmanager
def mount_cold(node: ScratchNode, options: Sequence[str] = ()) -> Iterator[PushMount]:
    """Make a new mount. The kernel knows its names and attributes, but holds no page of it, nor of the SSD tier."""
    path = Path(tempfile.mkdtemp(prefix="mount-", dir=node.directory)).resolve() / "mnt"
    with mount_dataset(DATASET, path, node.socket, path.with_suffix(".log"), options):
        subprocess.run(["find", path, "-type", "f", "-size", "+1"], check=True, stdout=subprocess.DEVNULL)
        # Dirty pages are not dropped.
        os.sync()
        if node.ssd.exists():
            drop_pages(node.ssd.iterdir())
        yield PushMount(node, path)


@contextmanager
def publish_job(node: ScratchNode, *consumers: JobPublication) -> Iterator[None]:
    """Publish the consumers of one job, and cancel the job at the end."""
    for consumer in consumers:
        node.client.call(JOB_PUBLISH, consumer)
    yield
    node.client.call(JOB_CANCEL, JobName(job=consumers[0].job))


def push_figures(before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
    """Return the pusher's work between two snapshots of the counters; empty if the mount does not push. Levels, such as
    the bytes held, are those of the second snapshot."""
    levels = ("push_held_bytes", "push_budget")
    names = [name for name in after if name.startswith("push_")]
    return {name: after[name] - (0 if name in levels else before.get(name, 0)) for name in names}
