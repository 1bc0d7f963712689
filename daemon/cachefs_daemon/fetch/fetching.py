"""Creates the parts that fetch blocks, from the configuration."""

from collections.abc import Callable

from cachefs_daemon.config import Config
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter
from cachefs_daemon.fetch.fetch_parts import FetchCounts, FetchParts, SourceLookups
from cachefs_daemon.fetch.fetch_processes import FetchProcesses
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.ports import BlockPeers
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import Storage


class Fetching:
    """The fetcher, its processes, and the limit of its reads from origins. Used on the event loop."""

    def __init__(
        self,
        config: Config,
        storage: Storage,
        sources: SourceLookups,
        make_peers: Callable[[ConcurrencyLimiter], BlockPeers],
        threads: Threads,
        errors: ErrorLog,
    ) -> None:
        """make_peers: returns the other nodes as a source of blocks, given the limit of reads from origins."""
        origin, prefetch, deadline = config.origin, config.prefetch, config.daemon.read_deadline
        counts, processes = FetchCounts(), config.fetch_processes if prefetch.enabled else 0
        self.limiter = ConcurrencyLimiter(origin.max_connections, origin.max_bytes_in_flight)
        self.processes = FetchProcesses(storage.reservations, threads, errors, counts, processes, deadline)
        self.fetcher = Fetcher(
            FetchParts(
                store=storage.blocks,
                sources=sources,
                threads=threads,
                limiter=self.limiter,
                errors=errors,
                read_deadline=deadline,
                peers=make_peers(self.limiter),
                fetch_in_process=self.processes.try_fetch,
                counts=counts,
                reads_parts=prefetch.enabled and prefetch.guess,
            )
        )

    async def close(self) -> None:
        """Cancel all fetches."""
        await self.fetcher.close()
        await self.processes.close()
