"""Records reads that wait for a block, and failures to get blocks: the data behind the node's list of troubles."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cachefs.errors import CachefsError
from cachefs.trouble_texts import Cause, cause_of_errno
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.origin.endpoint import Endpoint

# Pairs of snapshot and cause that are kept, most recent first.
MAX_FAILURES: Final = 64
# Failed reads kept per pair.
MAX_READS: Final = 1024


@dataclass(frozen=True, slots=True)
class WaitingRead:
    """A block, or part of one, that reads wait for."""

    key: bytes
    # Id of the snapshot for which the block is fetched.
    snapshot: str
    # Server of the block's origin.
    endpoint: Endpoint
    # Loop time at which the first of the reads began to wait.
    since: float
    # Whether a request may be in flight; otherwise the read waits for a permit.
    has_permit: bool
    # Names of the nodes with requests for it in flight.
    peers: tuple[str, ...] = ()
    # Failure of the last attempt.
    trouble: CachefsError | None = None
    # Whether only another node wants the block, and no read of this node.
    is_for_peer: bool = False


# Seconds after a failed read within which its job may still be published.
LATE_PUBLICATION_SECONDS: Final = 5.0


class ReadAttribution(NamedTuple):
    """The job to which a failed read belongs."""

    # Job id; empty if several jobs are possible, None if no job is.
    job: str | None
    # Whether the job's position in its sequence proves it; otherwise a job published later may be the reader.
    is_sure: bool


# Returns the readers of failed reads, given a snapshot and the keys of its blocks.
AttributeReads = Callable[[str, Sequence[bytes]], Sequence[ReadAttribution]]


@dataclass(slots=True)
class FailedRead:
    """A failed read of a block."""

    # Unix time in seconds.
    when: float
    key: bytes
    message: str
    # See `ReadAttribution`; None also while undecided.
    job: str | None = None


@dataclass(slots=True)
class ReadFailure:
    """Failures to get blocks of one snapshot, for one cause."""

    snapshot: str
    cause: Cause
    # Unix times of the first and last failure, in seconds.
    first: float
    last: float
    # Failures for which reads of this node waited.
    waited: int = 0
    # Message of the last failure.
    message: str = ""
    # The last MAX_READS failed reads of this node.
    reads: deque[FailedRead] = field(default_factory=lambda: deque(maxlen=MAX_READS))
    # Unix time of the last failure without a waiting read; 0 if there is none.
    ahead: float = 0.0

    def attribute(self, attribute_reads: AttributeReads, before: float) -> None:
        """Attribute reads to jobs, where not done yet. before: unix time; for reads that failed later, only sure
        attributions count."""
        new = [one for one in self.reads if one.job is None]
        for one, reader in zip(
            new, attribute_reads(self.snapshot, [one.key for one in new]) if new else (), strict=True
        ):
            if reader.is_sure or one.when <= before:
                one.job = reader.job

    def reads_of_job(self, job: str, moment: float) -> tuple[list[FailedRead], list[FailedRead]]:
        """Return the reads of *job* that failed since *moment* (unix time), and those that may be of any job."""
        late = [one for one in self.reads if one.when >= moment]
        return [one for one in late if one.job == job], [one for one in late if one.job == ""]


class ReadFailures:
    """Keeps failures to get blocks, for the last MAX_FAILURES pairs. Used on the event loop."""

    def __init__(self) -> None:
        self._failures: OrderedDict[tuple[str, Cause], ReadFailure] = OrderedDict()  # most recent last

    def add_failure(self, source: BlockSource, error: CachefsError, now: float, *, waited: bool) -> None:
        """Record a failure. now: unix time in seconds; waited: whether reads of this node waited for the block."""
        key = source.snapshot, cause_of_errno(error.errno)
        known = self._failures.pop(key, None) or ReadFailure(*key, first=now, last=now)
        text, subject = str(error), source.subject
        known.last, known.message = now, text if subject in text else f"{subject}: {text}"
        if waited:
            known.waited += 1
            known.reads.append(FailedRead(now, source.key, known.message))
        else:
            known.ahead = now
        self._failures[key] = known
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)

    def latest_first(self) -> list[ReadFailure]:
        """Return all failures, most recent first."""
        return list(reversed(self._failures.values()))
