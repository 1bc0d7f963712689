"""Explains why a job's loop has waited for its loaders, and what would help."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cachefs.counts import counted

# Part of its time that a loop has to wait for advice to be given.
WORTH_A_WORD: Final = 0.05
# Part of the waiting from which on the first epoch is the cause.
MOST_OF_IT: Final = 0.6
# Reads are not the cause where all workers' reads waited for a smaller part of the time that the loop waited.
_PART_OF_READS: Final = 0.2
# Part of the bytes that had to be fetched from which on fetching is the cause, even where reads counted no waits: those
# in an epoch whose files are being learned count for no job.
_PART_FETCHED: Final = 0.2
# Minimum busy time for advice about decoding: less is mostly spent on starting workers, which import torch.
SECONDS_TO_JUDGE: Final = 5.0
_WORDS: Final = {
    "origin": (
        "reads waited for the origin: the tiers have no room for all of the data, or the origin is too slow; give the "
        "tiers more room (memory.budget, ssd.budget), or the origin more bandwidth"
    ),
    "peer": "reads waited for other nodes of the cluster: see `cachectl cluster`",
    "ssd": "reads waited for the SSD tier: give the memory tier more room (memory.budget)",
    "daemon": "reads waited for the daemon, which was away: see its log",
}


@dataclass(frozen=True, slots=True)
class Waited:
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
    def share(self) -> float:
        """The part of its time that the loop has waited."""
        return min(1.0, self.waited / self.busy) if self.busy > 0 else 0.0


def reason(of: Waited, processors: int = 0, *, has_full_tier: bool = False) -> str:
    """Return one sentence without a full stop on why the loop waited, and what would help; "" where it has hardly
    waited.

    processors: number of the node's; 0 where unknown. has_full_tier: a tier takes no blocks, as its disk is full, so
    neither a warmup nor a larger budget would help.
    """
    if of.share < WORTH_A_WORD:
        return ""
    if of.is_learning:
        return "its files are being learned in this epoch, and read ahead from the next one on"
    is_first = of.first_waited >= MOST_OF_IT * of.waited
    if is_first and of.was_learned:
        return (
            "it waited in the first epoch, in which its files were learned: publish them in the code, or fetch them "
            "before the job (`cachectl warmup`)"
        )
    reads = sum(of.stalled.values())
    reads_waited = reads >= _PART_OF_READS * of.waited * max(1, of.workers)
    kind = max(of.stalled, key=lambda kind: of.stalled[kind]) if reads_waited and of.stalled else "origin"
    was_fetched = of.fetched_part * of.busy >= _PART_FETCHED * of.first_busy  # so much of the first epoch
    if has_full_tier and (was_fetched or reads_waited or of.fetched_part >= _PART_FETCHED) and kind == "origin":
        return "reads waited for the origin, as the disk of a tier is full: make room there (`cachectl status`)"
    if is_first and (was_fetched or reads_waited) and kind == "origin":
        return (
            "it waited in the first epoch, whose bytes came from the origin: fetch them before the job "
            "(`cachectl warmup`), or give the origin more bandwidth"
        )
    if of.is_unknown:
        return "what it reads is not understood, so nothing is read ahead: publish it in the code"
    if reads_waited or of.fetched_part >= _PART_FETCHED:
        return _WORDS.get(kind, _WORDS["origin"])
    if not of.has_figures or of.busy < SECONDS_TO_JUDGE:
        return ""
    workers = of.workers * of.processes
    loading = f"loading itself (decoding, in {counted(workers, 'worker') if workers else 'the training process'})"
    return f"its reads hardly waited, so {loading} is what takes the time: {_decoding_advice(workers, processors)}"


def _decoding_advice(workers: int, processors: int) -> str:
    """Return what helps a job whose time goes into decoding. workers: of all its processes on the node."""
    if not processors:
        return "more num_workers would help, if the node has processors to spare"
    has = f"this node has {counted(processors, 'processor')} and {counted(workers, 'worker')}"
    if workers < processors:
        return f"more num_workers would help, as {has}"
    return f"{has}: more would not help; decode less, or smaller pictures"
