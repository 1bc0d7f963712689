"""The parts of the node that fetches use, and the functions that say where the bytes of a block come from."""

from collections.abc import Callable
from dataclasses import dataclass, field

from cachefs.messages import BlockRef
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter
from cachefs_daemon.fetch.fetch_counts import FetchCounts
from cachefs_daemon.fetch.process_fetch import ProcessResultCallback
from cachefs_daemon.ports import NO_PEERS, BlockPeers
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore

# Lets a fetch process fetch a block, if one can: see `FetchProcesses.try_fetch`.
TryFetchInProcess = Callable[[BlockSource, ProcessResultCallback, Callable[[], None]], bool]


def _same_source(source: BlockSource) -> BlockSource:
    return source


def _is_never_replaced(_: str) -> bool:
    return False


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
