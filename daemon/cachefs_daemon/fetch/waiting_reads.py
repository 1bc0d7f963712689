"""Reads that wait for a block now, and why blocks could not be had: what the node's list of troubles is made of."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cachefs.errors import CachefsError
from cachefs.troubles import Cause, cause_of
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.origin.endpoint import Endpoint

# Pairs of a snapshot and a cause that are kept: those that were seen last.
KEPT: Final = 64
# Failed reads that are kept of each pair.
MOST_READS: Final = 1024


@dataclass(frozen=True, slots=True)
class WaitingRead:
    """A block, or a part of one, that reads wait for."""

    key: bytes
    # Id of the snapshot for whose sake it is fetched.
    snapshot: str
    # The server that its origin is on.
    endpoint: Endpoint
    # Loop time at which the first of the reads has begun to wait.
    since: float
    # May a request for it be under way? Else it waits until there may be one more.
    has_slot: bool
    # Names of other nodes that were asked for it and have not answered.
    peers: tuple[str, ...] = ()
    # Why the last attempt has failed.
    trouble: CachefsError | None = None
    # Does it come for another node, so that no read of this node waits?
    is_for_peer: bool = False


# Seconds after a failed read within which the job that has read may still be published.
SETTLED: Final = 5.0


class Reader(NamedTuple):
    """Which job a failed read is of."""

    # Empty where the read may be of several; None where it is of none.
    job: str | None
    # Is that known by where the job is in its sequence? Else another job may come that has read.
    is_sure: bool


# Says which jobs the failed reads of some blocks, by their keys, of a snapshot are of.
Whose = Callable[[str, Sequence[bytes]], Sequence[Reader]]


@dataclass(slots=True)
class FailedRead:
    """A block that reads have waited for and that could not be had."""

    # Unix time in seconds.
    when: float
    key: bytes
    message: str
    # See `Reader`; None also while that is not settled.
    job: str | None = None


@dataclass(slots=True)
class ReadFailure:
    """Blocks of one snapshot that could not be had for one cause."""

    snapshot: str
    cause: Cause
    # Unix time in seconds of the first and of the last one.
    first: float
    last: float
    # How many of them reads of this node have waited for.
    waited: int = 0
    # What was said of the last one.
    message: str = ""
    # The last MOST_READS of those that reads have waited for.
    reads: deque[FailedRead] = field(default_factory=lambda: deque(maxlen=MOST_READS))
    # Unix time of the last one that no read has waited for; 0: there is none.
    ahead: float = 0.0

    def attribute(self, whose: Whose, before: float) -> None:
        """Find out which jobs the reads are of, as far as that was not found out before. before: unix time; of reads
        that have failed later, only what is sure counts."""
        new = [one for one in self.reads if one.job is None]
        for one, reader in zip(new, whose(self.snapshot, [one.key for one in new]) if new else (), strict=True):
            if reader.is_sure or one.when <= before:
                one.job = reader.job

    def of(self, job: str, moment: float) -> tuple[list[FailedRead], list[FailedRead]]:
        """Return the reads of *job* that have failed since a unix time, and those that may be of any job."""
        late = [one for one in self.reads if one.when >= moment]
        return [one for one in late if one.job == job], [one for one in late if one.job == ""]


class ReadFailures:
    """Keeps why blocks could not be had, for the last KEPT pairs. Used on the event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, Cause], ReadFailure] = OrderedDict()  # the last one at the end

    def add(self, source: BlockSource, error: CachefsError, now: float, *, waited: bool) -> None:
        """A block could not be had. now: unix time in seconds; waited: have reads of this node waited for the block?"""
        key = source.snapshot, cause_of(error.errno)
        known = self._known.pop(key, None) or ReadFailure(*key, first=now, last=now)
        text, subject = str(error), source.subject
        known.last, known.message = now, text if subject in text else f"{subject}: {text}"
        if waited:
            known.waited += 1
            known.reads.append(FailedRead(now, source.key, known.message))
        else:
            known.ahead = now
        self._known[key] = known
        if len(self._known) > KEPT:
            self._known.popitem(last=False)

    def all(self) -> list[ReadFailure]:
        """Return all pairs, first the one that was seen last."""
        return list(reversed(self._known.values()))
