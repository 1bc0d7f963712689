"""Explains why a job's loop has waited for its loaders, and what would help."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cachefs.formatting import format_count

# Part of its time that a loop has to wait for advice to be given.
MIN_WAITED_SHARE: Final = 0.05
# Part of the waiting from which on the first epoch is the cause.
FIRST_EPOCH_PART: Final = 0.6
# Reads are not the cause where all workers' reads waited for a smaller part of the time that the loop waited.
_PART_OF_READS: Final = 0.2
# Part of the bytes that had to be fetched from which on fetching is the cause, even where reads counted no waits: those
# in an epoch whose files are being learned count for no job.
_PART_FETCHED: Final = 0.2
# Minimum busy time for advice about decoding: less is mostly spent on starting workers, which import torch.
SECONDS_TO_JUDGE: Final = 5.0
_ADVICE: Final = {
    "origin": (
        "reads waited for the origin: the tiers have no room for all of the data, or the origin is too slow; give the "
        "tiers more room (memory.budget, ssd.budget), or the origin more bandwidth"
    ),
    "peer": "reads waited for other nodes of the cluster: see `cachectl cluster`",
    "ssd": "reads waited for the SSD tier: give the memory tier more room (memory.budget)",
    "daemon": "reads waited while the daemon was down: see its log",
}


@dataclass(frozen=True, slots=True)
class WaitTimes:
    """The busy and waiting times, in seconds, of a loader, or of all loaders of a job."""

    # Time that it was busy, and part of that which the loop waited; and both for the first epoch alone.
    busy: float
    waited: float
    first_busy: float = 0.0
    first_waited: float = 0.0
    # Worker processes of the loader, in each training process.
    workers: int = 0
    # How long all its reads have waited, by cause: `origin`, `peer`, `ssd`, `daemon`.
    stalled: Mapping[str, float] = field(default_factory=dict)
    # Whether its files are being learned now; whether they were in the first epoch; whether it is not understood.
    is_learning: bool = False
    was_learned: bool = False
    is_unknown: bool = False
    # The part of the bytes read that had to be fetched; 0 where unknown.
    fetched_part: float = 0.0
    # Whether it is known how long its reads have waited.
    has_figures: bool = True
    # Training processes on this node that have such a loader.
    processes: int = 1

    @property
    def waited_share(self) -> float:
        """The part of its time that the loop has waited."""
        return min(1.0, self.waited / self.busy) if self.busy > 0 else 0.0


def explain_wait(wait_times: WaitTimes, processors: int = 0, *, has_full_tier: bool = False) -> str:
    """Return one sentence without a full stop on why the loop waited, and what would help; "" where it has hardly
    waited.

    processors: number of the node's; 0 where unknown. has_full_tier: a tier takes no blocks, as its disk is full, so
    neither a warmup nor a larger budget would help.
    """
    if wait_times.waited_share < MIN_WAITED_SHARE:
        return ""
    if wait_times.is_learning:
        return "its files are being learned in this epoch, and read ahead from the next one on"
    is_first = wait_times.first_waited >= FIRST_EPOCH_PART * wait_times.waited
    if is_first and wait_times.was_learned:
        return (
            "it waited in the first epoch, in which its files were learned: publish them in the code, or fetch them "
            "before the job (`cachectl warmup`)"
        )
    reads = sum(wait_times.stalled.values())
    reads_waited = reads >= _PART_OF_READS * wait_times.waited * max(1, wait_times.workers)
    kind = (
        max(wait_times.stalled, key=lambda kind: wait_times.stalled[kind])
        if reads_waited and wait_times.stalled
        else "origin"
    )
    was_fetched = (
        wait_times.fetched_part * wait_times.busy >= _PART_FETCHED * wait_times.first_busy
    )  # so much of the first epoch
    if has_full_tier and (was_fetched or reads_waited or wait_times.fetched_part >= _PART_FETCHED) and kind == "origin":
        return "reads waited for the origin, as the disk of a tier is full: make room there (`cachectl status`)"
    if is_first and (was_fetched or reads_waited) and kind == "origin":
        return (
            "it waited in the first epoch, whose bytes came from the origin: fetch them before the job "
            "(`cachectl warmup`), or give the origin more bandwidth"
        )
    if wait_times.is_unknown:
        return "its reads are not understood, so nothing is read ahead: publish them in the code"
    if reads_waited or wait_times.fetched_part >= _PART_FETCHED:
        return _ADVICE.get(kind, _ADVICE["origin"])
    if not wait_times.has_figures or wait_times.busy < SECONDS_TO_JUDGE:
        return ""
    workers = wait_times.workers * wait_times.processes
    loading = f"loading itself (decoding, in {format_count(workers, 'worker') if workers else 'the training process'})"
    return f"its reads hardly waited, so most of the time goes into {loading}: {_decoding_advice(workers, processors)}"


def _decoding_advice(workers: int, processors: int) -> str:
    """Return what helps a job whose time goes into decoding. workers: of all its processes on the node."""
    if not processors:
        return "more num_workers would help, if the node has processors to spare"
    has = f"this node has {format_count(processors, 'processor')} and {format_count(workers, 'worker')}"
    if workers < processors:
        return f"more num_workers would help, as {has}"
    return f"{has}: more would not help; decode less, or smaller pictures"
