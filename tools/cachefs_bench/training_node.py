"""A complete node for one run of `cachefs-bench train`: a throttled S3 server, a daemon with small tiers, and a
mount."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs_daemon.store.capacity import metadata_reserve
from cachefs_daemon.store.segment_writer import span
from cachefs_tools.child_programs import mount_dataset

from cachefs.errors import CachefsError
from cachefs.messages import OriginOptions
from cachefs.rpc import DaemonClient
from cachefs_bench.directory_node import DATASET, list_dataset
from cachefs_bench.lab.scratch_config import NodeSettings, TierSettings
from cachefs_bench.lab.scratch_node import memory_directory, run_daemon
from cachefs_bench.lab.slow_link import LinkLimits
from cachefs_bench.lab.throttle import Throttle, run_throttle
from cachefs_bench.origin_server import BUCKET, OriginServer
from cachefs_bench.scenario import Scenario

# The daemon requires room for one block of the largest size, whatever the sizes of the files.
BLOCK_SIZE: Final = 256 << 10
MIN_TIER: Final = BLOCK_SIZE + (64 << 10)
SEGMENT_SIZE: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class TrainingNode:
    """The running node."""

    client: DaemonClient
    socket: Path
    mountpoint: Path
    throttle: Throttle
    capacity: int  # samples that fit into the tiers


def budget_for(size: int) -> int:
    """Return the budget of a tier for blocks of *size* bytes in all.

    The tier reserves 1/128 of its budget for the file system (see cachefs_daemon.store.capacity.metadata_reserve).
    """
    return size + max(metadata_reserve(0), size // 127 + 1) if size else 0


def held_samples(scenario: Scenario) -> int:
    """Return the number of samples that the tiers hold together."""
    return round(scenario.tiers.capacity * scenario.shape.files)


def node_settings(scenario: Scenario) -> NodeSettings:
    """Return settings with tiers of the capacity. Raises CachefsError if the daemon would refuse them."""
    record = span(scenario.shape.size)
    if scenario.shape.size > BLOCK_SIZE:
        raise CachefsError(f"files of {scenario.shape.size} bytes are more than one block of {BLOCK_SIZE}")
    held = held_samples(scenario)
    in_memory = round(scenario.tiers.memory * held)
    # Tiers that hold everything need not be exact. Spare room keeps the budgets from having any effect.
    spare = 32 << 20 if scenario.tiers.capacity >= 1 else 0
    memory_budget, ssd_budget = (budget_for(blocks * record) + spare for blocks in (in_memory, held - in_memory))
    if memory_budget < MIN_TIER or 0 < ssd_budget < MIN_TIER:
        raise CachefsError("a tier would be smaller than one block; use more files or a larger capacity")
    memory, ssd = (TierSettings(budget, SEGMENT_SIZE) for budget in (memory_budget, ssd_budget))
    return NodeSettings(memory, ssd, BLOCK_SIZE, scenario.policy)


@contextmanager
def run_training_node(work: Path, server: OriginServer, scenario: Scenario) -> Iterator[TrainingNode]:
    """Run a new, empty node with the dataset listed and mounted. The origin is throttled after the listing."""
    settings = node_settings(scenario)
    mountpoint = work / "mnt"
    with ExitStack() as stack:
        memory = stack.enter_context(memory_directory("cachefs-bench-"))
        throttle = stack.enter_context(run_throttle(server.endpoint, LinkLimits(), work / "throttle.log"))
        node = stack.enter_context(run_daemon(work, memory, settings, server.credentials))
        options = OriginOptions(endpoint_url=throttle.endpoint, region="us-east-1", addressing_style="path")
        list_dataset(node.client, f"s3://{BUCKET}", options)
        # Jobs that drop the pages they have read would also drop pushed pages.
        pushing = "push" if scenario.keep_pages else "no_push"
        stack.enter_context(mount_dataset(DATASET, mountpoint, node.socket, work / "mount.log", [pushing]))
        throttle.set_limits(scenario.limits)
        yield TrainingNode(node.client, node.socket, mountpoint, throttle, held_samples(scenario))
