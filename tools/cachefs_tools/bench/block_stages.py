"""Divides each thread's processor time among stages, by samples of its stacks.

A sample tells where a thread is, not whether it runs: a thread that waits for the GIL looks like a running one. So the
kernel gives each thread's total, and samples only divide it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final


class Stage(StrEnum):
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
    ("evict", "store/transfers.py", Stage.EVICTION),
    ("shrink", "store/maintenance.py", Stage.EVICTION),
    ("promote", "store/block_store.py", Stage.EVICTION),
)
# Otherwise the innermost frame with one of these parts decides.
_INNERMOST: Final = (
    ("piece_checksums (", Stage.CHECKSUM),
    ("cachefs_daemon/origin/", Stage.GET),
    ("botocore/", Stage.GET),
    ("aiohttp/", Stage.GET),
    ("store/index_writer.py", Stage.INDEX),
    ("store/segment_writer.py", Stage.TIER_WRITE),
    ("store/batch_io.py", Stage.TIER_WRITE),
    ("store/tier.py", Stage.TIER_WRITE),
    ("store/tier_directory.py", Stage.TIER_WRITE),
    ("planning/eviction/", Stage.POLICY),
    ("planning/pagecache/", Stage.PUSH),
    ("cachefs_daemon/mounts/", Stage.PUSH),
    ("cachefs_daemon/jobs/attribution.py", Stage.ACCOUNTING),
    ("cachefs_daemon/jobs/", Stage.PLAN),
    ("planning/sequences/follower.py", Stage.ACCOUNTING),
    ("planning/", Stage.PLAN),
    ("fetch/prefetcher.py", Stage.PLAN),
    ("fetch/promoter.py", Stage.PLAN),
    ("cachefs_daemon/exchange.py", Stage.ACCOUNTING),
    ("cachefs_daemon/fetch/", Stage.FETCH),
    ("cachefs_daemon/datasets/", Stage.FETCH),
    ("cachefs_daemon/store/", Stage.TIER_WRITE),
    ("cachefs_daemon/api/", Stage.REPLIES),
    ("grpc/", Stage.REPLIES),
    ("cachefs_daemon/runtime/", Stage.LOOP),
    ("asyncio/", Stage.LOOP),
    ("concurrent/futures/", Stage.LOOP),
)


# A thread waits if its innermost frame is one of these functions.
_WAITS: Final = frozenset(
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


def stage_of(frames: Sequence[str]) -> Stage:
    """Return the stage of a stack. frames: outermost first."""
    for function, file, stage in _WHOLE_STACK:
        if any(_function(frame) == function and file in frame for frame in frames):
            return stage
    for frame in reversed(frames):
        for part, stage in _INNERMOST:
            if part in frame:
                return stage
    return Stage.OTHER


def by_stage(stacks: Iterable[str], seconds: Mapping[int, float]) -> dict[Stage, float]:
    """Return the processor seconds of each stage.

    stacks: lines as `py-spy record --threads --format raw` writes them: a thread, its stack, and a sample count;
    seconds: processor time by thread id. Raises ValueError for any other line.
    """
    seen: defaultdict[int, Counter[Stage]] = defaultdict(Counter)
    for line in stacks:
        stack, _, count = line.strip().rpartition(" ")
        thread, *frames = stack.split(";")
        number = int(thread.partition("(")[2].partition(")")[0])
        if frames and frames[-1].partition(" (")[0] not in _WAITS:
            seen[number][stage_of(frames)] += int(count)
    found = dict.fromkeys(Stage, 0.0)
    for number, used in seconds.items():
        samples = seen[number]
        if not samples:
            found[Stage.GRPC] += used  # never seen in Python code
        for stage, times in samples.items():
            found[stage] += used * times / samples.total()
    return found


def _function(frame: str) -> str:
    """Return the name of a frame's function, without its class."""
    return frame.partition(" (")[0].rpartition(".")[2]
