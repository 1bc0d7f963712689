"""Divides each thread's processor time among stages, by samples of its stacks.

A sample tells where a thread is, not whether it runs: a thread that waits for the GIL looks like a running one. So the
kernel gives each thread's total, and samples only divide it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final


class BlockStage(StrEnum):
    """A stage of a block's way from the origin to its reader."""

    GET = "GET"
    CHECKSUM = "checksum"
    TIER_WRITE = "tier write"
    INDEX = "index"
    POLICY = "policy"
    EVICTION = "eviction and demotion"
    PLAN = "plan and look-ahead"
    FETCH = "fetch and slot"
    PUSH = "push orders"
    ACCOUNTING = "accounting"
    REPLIES = "replies"
    FETCH_PROCESS = "fetch process"
    LOOP = "event loop and threads"
    GRPC = "gRPC's own threads"
    OTHER = "other"


# py-spy writes a frame as "function (file:line)". A stack with a frame of this function in this file belongs to the
# stage.
_WHOLE_STACK: Final = (
    ("evict_blocks", "store/transfers.py", BlockStage.EVICTION),
    ("shrink", "store/maintenance.py", BlockStage.EVICTION),
    ("promote", "store/block_store.py", BlockStage.EVICTION),
)
# Otherwise the innermost frame with one of these parts decides.
_INNERMOST: Final = (
    ("piece_checksums (", BlockStage.CHECKSUM),
    ("cachefs_daemon/origin/", BlockStage.GET),
    ("botocore/", BlockStage.GET),
    ("aiohttp/", BlockStage.GET),
    ("store/index_writer.py", BlockStage.INDEX),
    ("store/segment_writer.py", BlockStage.TIER_WRITE),
    ("store/batch_io.py", BlockStage.TIER_WRITE),
    ("store/tier.py", BlockStage.TIER_WRITE),
    ("store/tier_directory.py", BlockStage.TIER_WRITE),
    ("planning/eviction/", BlockStage.POLICY),
    ("planning/pagecache/", BlockStage.PUSH),
    ("cachefs_daemon/mounts/", BlockStage.PUSH),
    ("cachefs_daemon/jobs/attribution.py", BlockStage.ACCOUNTING),
    ("cachefs_daemon/jobs/", BlockStage.PLAN),
    ("planning/sequences/follower.py", BlockStage.ACCOUNTING),
    ("planning/", BlockStage.PLAN),
    ("fetch/prefetcher.py", BlockStage.PLAN),
    ("fetch/promoter.py", BlockStage.PLAN),
    ("cachefs_daemon/report_dispatcher.py", BlockStage.ACCOUNTING),
    ("cachefs_daemon/fetch/", BlockStage.FETCH),
    ("cachefs_daemon/datasets/", BlockStage.FETCH),
    ("cachefs_daemon/store/", BlockStage.TIER_WRITE),
    ("cachefs_daemon/api/", BlockStage.REPLIES),
    ("grpc/", BlockStage.REPLIES),
    ("cachefs_daemon/runtime/", BlockStage.LOOP),
    ("asyncio/", BlockStage.LOOP),
    ("concurrent/futures/", BlockStage.LOOP),
)


# A thread waits if its innermost frame is one of these functions.
_WAITING_FUNCTIONS: Final = frozenset(
    (
        "Condition.wait",
        "Event.wait",
        "Locked.__enter__",
        "EpollSelector.select",
        "_worker",
        "_poll_wrapper",
        "Thread.run",
    )
)


def stack_stage(frames: Sequence[str]) -> BlockStage:
    """Return the stage of a stack. frames: outermost first."""
    for function, file, stage in _WHOLE_STACK:
        if any(_function(frame) == function and file in frame for frame in frames):
            return stage
    for frame in reversed(frames):
        for part, stage in _INNERMOST:
            if part in frame:
                return stage
    return BlockStage.OTHER


def seconds_by_stage(stacks: Iterable[str], seconds: Mapping[int, float]) -> dict[BlockStage, float]:
    """Return the processor seconds of each stage.

    stacks: lines as `py-spy record --threads --format raw` writes them: a thread, its stack, and a sample count;
    seconds: processor time by thread id. Raises ValueError for any other line.
    """
    seen: defaultdict[int, Counter[BlockStage]] = defaultdict(Counter)
    for line in stacks:
        stack, _, count = line.strip().rpartition(" ")
        thread, *frames = stack.split(";")
        number = int(thread.partition("(")[2].partition(")")[0])
        if frames and frames[-1].partition(" (")[0] not in _WAITING_FUNCTIONS:
            seen[number][stack_stage(frames)] += int(count)
    found = dict.fromkeys(BlockStage, 0.0)
    for number, used in seconds.items():
        samples = seen[number]
        if not samples:
            found[BlockStage.GRPC] += used  # never seen in Python code
        for stage, times in samples.items():
            found[stage] += used * times / samples.total()
    return found


def _function(frame: str) -> str:
    """Return the name of a frame's function, without its class."""
    return frame.partition(" (")[0].rpartition(".")[2]
