"""A whole node for one benchmark run: S3 server, throttled; daemon with small tiers; mount."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs_daemon.store.capacity import metadata_reserve
from cachefs_daemon.store.segment_writer import span

from cachefs.errors import CachefsError
from cachefs.messages import DatasetAdd, OriginOptions
from cachefs.rpc import DATASET_ADD, DaemonClient
from cachefs_tools.bench.link import Limits
from cachefs_tools.bench.origin_server import BUCKET, OriginServer
from cachefs_tools.bench.scenario import Scenario
from cachefs_tools.bench.throttle import Throttle, throttled
from cachefs_tools.scratch_node import daemon, mounted

DATASET: Final = "bench"
# The daemon asks for room for a block of the largest size, whatever the files are.
BLOCK_SIZE: Final = 256 << 10
LEAST_TIER: Final = BLOCK_SIZE + (64 << 10)
CONFIG: Final = """\
[daemon]
socket = "{socket}"
state_dir = "{work}/state"
block_size = {block_size}
policy = "{policy}"

[memory]
dir = "{memory}"
budget = {memory_budget}
segment_size = "16MiB"

[ssd]
dir = "{work}/ssd"
budget = {ssd_budget}
min_free = 0
segment_size = "16MiB"
"""


@dataclass(frozen=True, slots=True)
class TrainingNode:
    """capacity: samples that fit into the tiers."""

    client: DaemonClient
    socket: Path
    mountpoint: Path
    throttle: Throttle
    capacity: int


def budget_for(size: int) -> int:
    """The budget of a tier that takes blocks of so many bytes in all, beside what it keeps for the file system (1/128,
    see cachefs_daemon.store.capacity.metadata_reserve)."""
    return size + max(metadata_reserve(0), size // 127 + 1) if size else 0


@contextmanager
def training_node(work: Path, server: OriginServer, scenario: Scenario) -> Iterator[TrainingNode]:
    """A new, empty node with the dataset listed and mounted; from then on the origin is throttled."""
    record = span(scenario.shape.size)
    if scenario.shape.size > BLOCK_SIZE:
        raise CachefsError(f"files of {scenario.shape.size} bytes are more than one block of {BLOCK_SIZE}")
    held = round(scenario.tiers.capacity * scenario.shape.files)
    in_memory = round(scenario.tiers.memory * held)
    # Tiers that hold everything need not be exact, and some room to spare keeps the budgets from being felt.
    spare = 32 << 20 if scenario.tiers.capacity >= 1 else 0
    memory_budget, ssd_budget = (budget_for(blocks * record) + spare for blocks in (in_memory, held - in_memory))
    if memory_budget < LEAST_TIER or 0 < ssd_budget < LEAST_TIER:
        raise CachefsError("a tier would be smaller than one block; use more files or a larger capacity")
    socket, mountpoint = work / "cachefsd.sock", work / "mnt"
    with ExitStack() as stack:
        memory = Path(tempfile.mkdtemp(prefix="cachefs-bench-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, memory, ignore_errors=True)
        throttle = stack.enter_context(throttled(server.endpoint, Limits(), work / "throttle.log"))
        config = work / "cachefsd.toml"
        budgets = {"memory_budget": memory_budget, "ssd_budget": ssd_budget, "block_size": BLOCK_SIZE}
        places = {"work": work, "socket": socket, "memory": memory}
        config.write_text(CONFIG.format(**places, **budgets, policy=scenario.policy))
        client = stack.enter_context(daemon(config, socket, work / "cachefsd.log", server.account))
        options = OriginOptions(endpoint_url=throttle.endpoint, region="us-east-1", addressing_style="path")
        for _ in client.stream(DATASET_ADD, DatasetAdd(name=DATASET, url=f"s3://{BUCKET}", options=options)):
            pass
        # Where jobs drop what they have read, what was pushed would be dropped with it.
        pushing = "push" if scenario.keep_pages else "no_push"
        stack.enter_context(mounted(DATASET, mountpoint, socket, work / "mount.log", [pushing]))
        throttle.limit(scenario.limits)
        yield TrainingNode(client, socket, mountpoint, throttle, held)
