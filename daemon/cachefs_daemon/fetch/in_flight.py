"""Manages all fetches in flight, each from its request until its block is in a tier.

A fetch asks other nodes first (`cachefs_daemon.ports.BlockPeers`), then the origin (`OriginSource`), and both at once
if a node is late: the first bytes count. It is independent of the readers that requested it: it continues when a reader
goes away (a killed process, a dead mount), and is retried until the latest deadline of all requests. Reads on demand
are fetched before reads ahead.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from cachefs.block import BlockLocation
from cachefs.errors import CachefsError, ObjectChanged, OriginUnavailable
from cachefs.planning.prefetch.fetch_window import FetchLatency
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.block_fetch import BlockFetch, BlockFetchOutcome, BypassBlock, BypassBlocks, RecentOutcomes
from cachefs_daemon.fetch.concurrency_limiter import UNPLANNED, ReadPurpose
from cachefs_daemon.fetch.fetch_parts import ORIGIN, PEER, FetchParts
from cachefs_daemon.fetch.origin_source import FIRST_LATENCY, OriginSource
from cachefs_daemon.fetch.partial_blocks import PartialBlocks
from cachefs_daemon.fetch.tier_writes import BlockWriter
from cachefs_daemon.fetch.waiting_reads import ReadFailures, WaitingRead
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.ports import BlockSearch, FoundBlock

# Seconds that a reader must have left for other nodes to be asked after the origin failed.
MIN_SECONDS_FOR_PEERS: Final = 1.0

# Called for each fetched block with its snapshot, ORIGIN or PEER, and its bytes.
BlockListener = Callable[[str, str, int], None]


class InFlightFetches:
    """All fetches in flight, and the outcomes of recent ones. Used on the event loop."""

    def __init__(self, parts: FetchParts) -> None:
        self._errors = parts.errors
        self._limiter = parts.limiter
        self._read_deadline = parts.read_deadline
        self._is_replaced = parts.sources.is_replaced
        self._next_reader = parts.sources.next_reader
        self._peers = parts.peers
        self._fetches: dict[bytes, BlockFetch] = {}  # by block key
        self._recent_outcomes = RecentOutcomes()
        self.failures = ReadFailures()
        self.counts = parts.counts
        self._writer = BlockWriter(parts)
        self._origin_source = OriginSource(
            parts, self._writer.is_likely_refused, self._start_read, self._finish_stored_fetch
        )
        self._block_listeners: list[BlockListener] = []
        self.fetched_blocks = self.fetched_bytes = 0  # from origins, since the daemon started
        # Bytes from origins by job and server. `OriginShares` removes jobs that have ended.
        self.job_bytes: Counter[tuple[str, Endpoint]] = Counter()
        self.peer_blocks = self.peer_bytes = 0  # from peers, since the daemon started
        self.latency = FetchLatency(FIRST_LATENCY)  # of a fetch, from its permit until its block is in a tier

    @property
    def bypass_blocks(self) -> BypassBlocks:
        """Blocks that no tier could hold, for their readers."""
        return self._writer.bypass_blocks

    @property
    def partial_blocks(self) -> PartialBlocks:
        """Parts of blocks that are here before the whole block."""
        return self._origin_source.partial_blocks

    def add_block_listener(self, listener: BlockListener) -> None:
        """Call *listener* for each fetched block from now on."""
        self._block_listeners.append(listener)

    async def close(self) -> None:
        """Cancel all fetches."""
        fetches = list(self._fetches.values())
        for fetch in fetches:
            if fetch.peer_search is not None:
                fetch.peer_search.cancel()
            if fetch.task is None:
                fetch.permit.cancel_or_release()
        tasks = [fetch.task for fetch in fetches if fetch.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for fetch in fetches:
            if not fetch.is_done:
                self._finish_fetch(fetch, _daemon_stopping())
        await self._origin_source.close()
        self.bypass_blocks.close()

    def recent_outcome_or_source(
        self, source: BlockSource, looked_up_at: float, *, for_peer: bool = False, ahead: bool = False
    ) -> BlockSource | BlockFetchOutcome:
        """Return what is known of a block: the bypass block; or the outcome of a fetch that has just failed, or has
        ended since *looked_up_at* (loop time), as the look-up in the store may have missed it; otherwise the source.

        for_peer: another node asks. A failure of a fetch for other nodes alone does not apply to readers here. ahead:
        no read waits for it. A read of this node that meets a failure is counted as failed.
        """
        bypass = self._writer.bypass_blocks.get(source.key)
        if bypass is not None:
            return bypass
        outcome = self._recent_outcomes.outcome_of(source.key, looked_up_at, for_peer=for_peer)
        if outcome is None:
            return source
        if isinstance(outcome, CachefsError) and not ahead and not for_peer:
            self.failures.add_failure(source, outcome, time.time(), waited=True)
        return outcome

    def is_fetching(self, key: bytes) -> bool:
        """Return whether the block is being fetched, or is queued."""
        return key in self._fetches

    def waiting_reads(self, since: float) -> list[WaitingRead]:
        """Return the blocks that reads have waited for since *since* (loop time) or longer."""
        return [
            WaitingRead(
                key=fetch.source.key,
                snapshot=fetch.source.snapshot,
                endpoint=fetch.source.origin.endpoint,
                since=fetch.waited_since,
                has_permit=fetch.permit.is_held or fetch.is_being_stored,
                peers=fetch.peer_search.requested_nodes if fetch.peer_search is not None else (),
                trouble=fetch.deadline.last_error,
                is_for_peer=fetch.is_for_peer,
            )
            for fetch in self._fetches.values()
            if fetch.waited_since <= since and not fetch.is_done
        ]

    def add_done_callback(self, key: bytes, callback: Callable[[BlockFetch], None]) -> None:
        """Call *callback* when the fetch of the block with this key ends; never, if there is none."""
        if (fetch := self._fetches.get(key)) is not None:
            fetch.add_done_callback(callback)

    def join_or_start_fetch(
        self,
        source: BlockSource,
        *,
        ahead: bool,
        purpose: ReadPurpose | None = None,
        may_be_transient: bool = False,
        for_peer: bool = False,
    ) -> BlockFetch:
        """Return the fetch of a block, started if there is none.

        purpose: None: a read on demand is for the job that reads the block next, and a read ahead for none. for_peer:
        another node asks. No other node is then asked to fetch the block, so nodes never wait for each other, whatever
        their views of the routes. Nodes that may have the block are only asked whether they do, which they answer at
        once.
        """
        until = asyncio.get_running_loop().time() + self._read_deadline
        fetch = self._fetches.get(source.key)
        if fetch is not None and not ahead and not fetch.deadline.extend(until):
            fetch = None  # it has just been given up
        if fetch is None:
            if purpose is None and not ahead:
                purpose = ReadPurpose(self._next_reader(source))
            fetch = self._add_fetch(source, ahead, Deadline(until), purpose or UNPLANNED)
            fetch.may_be_transient, fetch.is_for_peer = may_be_transient, for_peer
            if not ahead:
                fetch.waited_since = until - self._read_deadline
            fetch.has_local_reader = not ahead and not for_peer
            if not self._try_peers_first(fetch):
                self._origin_source.request_block(fetch)
            return fetch
        fetch.has_local_reader = fetch.has_local_reader or not (ahead or for_peer)
        fetch.is_for_peer = fetch.is_for_peer and for_peer  # if the origin refuses it, other nodes are asked
        if not ahead and not fetch.has_reader:
            fetch.has_reader = True
            fetch.waited_since = until - self._read_deadline
            self._origin_source.raise_priority(fetch)
        elif not ahead and fetch.task is None:
            self._limiter.promote(source.key)  # this reader's turn may be sooner than the first asker's
        if fetch.peer_search is not None:
            if for_peer and not fetch.is_delegated:
                fetch.peer_search.forbid_delegation()
            if not ahead:
                fetch.peer_search.raise_priority()
        return fetch

    def delegate_fetch(self, source: BlockSource, node_id: str, *, ahead: bool) -> bool:
        """Decide whether a requesting node should fetch the block itself, since this node is overloaded. If so, this
        node gets the block from there: other requests here wait for it, and it stays a single read of the origin.

        node_id: the requesting node; ahead: no reader waits there yet.
        """
        fetch = self._fetches.get(source.key)
        if fetch is not None and (fetch.is_running or self._origin_source.is_in_process(fetch)):
            return False
        wait = self._origin_source.expected_wait(source.origin.endpoint)
        if not self._peers.can_delegate(node_id, wait, ahead=ahead):
            return False
        if fetch is None:
            until = asyncio.get_running_loop().time() + self._read_deadline
            fetch = self._add_fetch(source, True, Deadline(until), UNPLANNED)
        fetch.is_delegated = True
        search = self._peers.search_delegated(fetch, node_id, partial(self._handle_search_result, fetch))
        if search is None:
            fetch.is_delegated = False
            self._origin_source.request_block(fetch)  # the node has just become unusable
            return False
        self._start_peer_search(fetch, search)
        return True

    def _add_fetch(self, source: BlockSource, ahead: bool, deadline: Deadline, purpose: ReadPurpose) -> BlockFetch:
        permit = self._limiter.new_permit(
            source.key, source.length, source.origin.endpoint, ahead=ahead, purpose=purpose
        )
        fetch = self._fetches[source.key] = BlockFetch(source, not ahead, deadline, permit)
        return fetch

    def origin_refusal(self, source: BlockSource) -> CachefsError | None:
        """Return the origin's error for a block that is now being searched on all other nodes; None if there is no such
        search."""
        fetch = self._fetches.get(source.key)
        return fetch.origin_refusal if fetch is not None else None

    # --- from other nodes ---------------------------------------------------------------------------------------------

    def _try_peers_first(self, fetch: BlockFetch) -> bool:
        """Search other nodes for the block. Returns False if none is to be asked."""
        try:
            route = self._peers.find_route(fetch)
            if route is None:
                return False
            fetch.is_kept_here = route.is_kept_here
            if not fetch.has_reader and self._writer.is_likely_refused(fetch):
                return False
            search = route.search(partial(self._handle_search_result, fetch))
            if search is None:
                return False
            self._start_peer_search(fetch, search)
            return True
        # A bug: otherwise the fetch would never end, and all readers would wait for their deadlines.
        except Exception as error:
            self._errors.add(
                fetch.source.subject, f"internal error ({error!r}); fetching from the origin instead", bug=error
            )
            if fetch.peer_search is not None:
                fetch.peer_search.cancel()
                fetch.peer_search = None
            return False

    def _start_peer_search(self, fetch: BlockFetch, search: BlockSearch) -> None:
        self._origin_source.withdraw_request(fetch)  # it may be queued for the origin
        fetch.peer_search = search
        if fetch.is_for_peer and not fetch.is_delegated:
            search.forbid_delegation()
        search.start()

    def _search_all_nodes(self, fetch: BlockFetch, error: CachefsError) -> bool:
        """Ask all other nodes after the origin refused this one: they may have other credentials or disks. Returns
        False if that is useless."""
        if fetch.is_for_peer or fetch.origin_refusal is not None:
            return False
        if isinstance(error, ObjectChanged) or fetch.deadline.seconds_left < MIN_SECONDS_FOR_PEERS:
            return False
        if fetch.peer_search is not None:
            fetch.peer_search.cancel()
        search = self._peers.search_all(fetch, partial(self._handle_search_result, fetch))
        if search is None:
            return False
        fetch.permit.cancel_or_release()
        fetch.origin_refusal, fetch.peer_search, fetch.task = error, search, None
        search.start()
        return True

    def _handle_search_result(self, fetch: BlockFetch, found: FoundBlock | None) -> None:
        """Handle the result of a search: a peer gave the block, or the origin is to be asked too."""
        if fetch.is_done or fetch.is_being_stored:
            return
        if found is None and fetch.origin_refusal is not None:
            self._note_failure(fetch, fetch.origin_refusal)
            self._finish_fetch(fetch, fetch.origin_refusal)
            return
        if found is None:
            self._origin_source.request_block(fetch)
            return
        if fetch.task is not None:
            fetch.task.cancel()
        fetch.permit.cancel_or_release()
        fetch.started_at, fetch.source_peer = found.requested_at, f"peer {found.node_name}"
        fetch.task = asyncio.create_task(self._run_fetch(fetch, found))

    def outcome_of(self, fetch: BlockFetch) -> BlockFetchOutcome:
        """Return the outcome of a fetch; an error if it takes longer than its reader can wait."""
        if fetch.is_done:
            return fetch.outcome
        why = fetch.deadline.last_error or "its origin is slow or unreachable"
        return OriginUnavailable(f"{fetch.source.subject} did not arrive within the read deadline; {why}")

    async def bypass(self, fetch: BlockFetch, reason: str) -> BypassBlock:
        """Return the arrived bytes as a bypass block, which no tier has or takes. reason: for the log."""
        return await self._writer.bypass(fetch, reason)

    # --- the run of a fetch -------------------------------------------------------------------------------------------

    def _start_read(self, fetch: BlockFetch) -> None:
        fetch.task = asyncio.create_task(self._run_fetch(fetch))

    async def _run_fetch(self, fetch: BlockFetch, found: FoundBlock | None = None) -> None:
        """Get the block, and store it. found: the block, as a peer gave it; None: read it from the origin."""
        outcome: BlockFetchOutcome = _daemon_stopping()
        try:
            if found is not None:
                fetch.set_bytes(found.data, asyncio.get_running_loop().time(), found.checksums)
                found = None  # no reference may keep its bytes
                outcome = await self._writer.store_block(fetch, PEER)
                self._count_fetched(fetch)
            elif await self._origin_source.read(fetch):
                if fetch.early_block is not None and self._writer.has_room:
                    fetch.permit.cancel_or_release()  # no reader waits for it any more
                outcome = await self._writer.store_block(fetch, ORIGIN)
                self._count_fetched(fetch)
            else:
                outcome = None
        except CachefsError as error:
            if isinstance(error, ObjectChanged) and self._is_replaced(fetch.source.snapshot):
                error = error.for_older_snapshot()
            outcome = error
            if found is None and self._search_all_nodes(fetch, error):
                return
            self._note_failure(fetch, error)
        except Exception as error:
            outcome = CachefsError(f"{fetch.source.subject}: internal error ({error!r}); see the daemon's log")
            self._errors.add(fetch.source.subject, str(outcome), bug=error)
        finally:
            if fetch.task is asyncio.current_task():  # otherwise a peer was quicker than the origin, or is asked now
                self._finish_fetch(fetch, outcome)

    def _finish_stored_fetch(self, fetch: BlockFetch, location: BlockLocation) -> None:
        """End a fetch whose block a fetch process has put into a tier."""
        if fetch.task is not None:
            fetch.task.cancel()
            fetch.source_peer = ""
        self._count_fetched(fetch)
        self._finish_fetch(fetch, location)

    def _count_fetched(self, fetch: BlockFetch) -> None:
        self.latency.measure(asyncio.get_running_loop().time() - fetch.started_at)
        if fetch.source_peer:
            self.peer_blocks += 1
            self.peer_bytes += fetch.source.length
        else:
            self.fetched_blocks += 1
            self.fetched_bytes += fetch.source.length
            self.job_bytes[fetch.permit.job, fetch.source.origin.endpoint] += fetch.source.length
        for listener in self._block_listeners:
            listener(fetch.source.snapshot, PEER if fetch.source_peer else ORIGIN, fetch.source.length)

    def _note_failure(self, fetch: BlockFetch, error: CachefsError) -> None:
        self._errors.add(fetch.source.subject, str(error))
        # The other node counts its own failed read.
        self.failures.add_failure(fetch.source, error, time.time(), waited=fetch.has_local_reader)

    def _finish_fetch(self, fetch: BlockFetch, outcome: BlockFetchOutcome) -> None:
        if fetch.is_done:
            return  # a fetch process was quicker
        key = fetch.source.key
        if fetch.peer_search is not None:
            fetch.peer_search.cancel()
        if self._fetches.get(key) is fetch:
            del self._fetches[key]
        self._origin_source.end_request(fetch)
        if not isinstance(outcome, BypassBlock):  # `bypass_blocks` decides how long those are remembered
            self._recent_outcomes.add_outcome(fetch, outcome)
        fetch.finish(outcome)


def _daemon_stopping() -> CachefsError:
    return CachefsError("the daemon is stopping")
