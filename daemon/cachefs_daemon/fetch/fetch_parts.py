"""The parts of the node that fetches use: functions that say where the bytes of a block come from, and the counts of
fetched blocks by source, and by whether they were of use."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cachefs.messages import BlockRef
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter
from cachefs_daemon.fetch.process import ProcessResultCallback
from cachefs_daemon.ports import NO_PEERS, BlockPeers
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore

# Sources of blocks.
ORIGIN: Final = "origin"
PEER: Final = "peer"
SOURCES: Final = (ORIGIN, PEER)

# Lets a fetch process fetch a block, if one can: see `FetchProcesses.try_fetch`.
TryFetchInProcess = Callable[[BlockSource, ProcessResultCallback, Callable[[], None]], bool]


class FetchResult(StrEnum):
    """Outcome of a fetched block."""

    STORED = "stored"  # written to a tier
    BYPASSED = "passed"  # given to its readers as a bypass block, as no tier could hold it
    DISCARDED = "discarded"  # no longer wanted, or another copy arrived first


class FetchCounts:
    """Counts since the daemon started. Used on the event loop."""

    def __init__(self) -> None:
        self.blocks: Counter[tuple[str, FetchResult]] = Counter()
        self.bytes: Counter[tuple[str, FetchResult]] = Counter()

    def count_block(self, source: str, result: FetchResult, size: int) -> None:
        """Count a block of *size* bytes."""
        self.blocks[source, result] += 1
        self.bytes[source, result] += size

    def count_discarded(self, size: int) -> None:
        """Count discarded bytes from an origin."""
        self.count_block(ORIGIN, FetchResult.DISCARDED, size)


def _same_source(source: BlockSource) -> BlockSource:
    return source


def _is_never_replaced(_: str) -> bool:
    return False


def _no_reader(_: BlockSource) -> str:
    return ""


def _no_fetch_process(_: BlockSource, __: ProcessResultCallback, ___: Callable[[], None]) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class SourceLookups:
    """Functions that say where the bytes of a block come from."""

    # Returns the source of a block, or raises CachefsError. Called in any thread.
    resolve: Callable[[BlockRef], BlockSource]
    # Returns the current source of a block: its origin may have got another endpoint since the fetch began.
    renew: Callable[[BlockSource], BlockSource] = _same_source
    # Returns whether a refresh has replaced the snapshot with this id. Another refresh then does not help its readers.
    is_replaced: Callable[[str], bool] = _is_never_replaced
    # Returns the job that reads a block next, as far as it is known; empty otherwise.
    next_reader: Callable[[BlockSource], str] = _no_reader


@dataclass(frozen=True, slots=True)
class FetchParts:
    """The parts of the node that fetches use, and their settings."""

    store: BlockStore
    sources: SourceLookups
    threads: Threads
    limiter: ConcurrencyLimiter  # of reads from origins
    errors: ErrorLog
    # Longest time in seconds that a reader waits for an origin.
    read_deadline: float
    peers: BlockPeers = NO_PEERS
    fetch_in_process: TryFetchInProcess = _no_fetch_process
    counts: FetchCounts = field(default_factory=FetchCounts)
    # Serve random reads in large blocks before the rest of the block.
    reads_parts: bool = False
