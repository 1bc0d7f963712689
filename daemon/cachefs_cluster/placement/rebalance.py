"""Rebalances: fetches blocks that this node keeps and lacks from other nodes.

A node that joins or comes back fills up this way. A node that drains pushes nothing: the nodes that take over its
blocks pull them. Blocks that are read next come first. No block comes from an origin: a block that no node has is
fetched when it is read, or as planned by a job.

Once nothing is left to move, a node pulls the second copies that it keeps of hot snapshots, as far as it has room.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.errors import CachefsError
from cachefs.messages import BlockRef
from cachefs.planning.blocks.presence import Presence
from cachefs.planning.cluster.ownership import Ownership
from cachefs.planning.sequences.plan import Plan
from cachefs.sizes import format_size
from cachefs.snapshot import Snapshot
from cachefs_cluster.membership.membership import Membership
from cachefs_cluster.membership.view import NodeRecord
from cachefs_cluster.peers.client import PeerClient
from cachefs_cluster.peers.peer_requests import BlockNotFound, BlockRequest, PeerBlock, PeerResponse, RequestOptions
from cachefs_cluster.placement.holders import PlacementRing
from cachefs_cluster.placement.missing_blocks import MissingBlocks, MissingBlockSearch, RingChange
from cachefs_cluster.placement.rebalance_status import ring_digest
from cachefs_cluster.placement.shared_snapshot import SharedSnapshot
from cachefs_cluster.sharing.sections import REBALANCE, REBALANCE_NAME, RebalanceFacts
from cachefs_cluster.sharing.state import SharedState
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore, BlockToStore

# Blocks per batch, and their bytes.
BATCH_BLOCKS: Final = 64
BATCH_BYTES: Final = 16 << 20
# Longest time of a batch at full bandwidth, in seconds (except for a single block): avoids bursts.
MAX_BATCH_TIME: Final = 0.25
# Timeout of a batch, in seconds.
BATCH_TIMEOUT: Final = 20.0
# Blocks of a sample, evenly spread, that is asked for first if there are at least MIN_BLOCKS_TO_SAMPLE. A node that has
# none of the sample is not asked for the rest: a dataset that no node has read yet would cost millions of requests.
SAMPLED_BLOCKS: Final = 256
MIN_BLOCKS_TO_SAMPLE: Final = 4 * SAMPLED_BLOCKS
# Retries of blocks whose nodes could not be asked or were busy; and seconds before each.
MAX_RETRIES: Final = 3
RETRY_SECONDS: Final = 2.0

# Called with handled blocks and bytes; returns whether to go on.
ReportProgress = Callable[[int, int], bool]
log = logging.getLogger(__name__)

# Seconds for which membership must be stable before blocks are moved: nodes that join or leave together count as one
# change, and shared snapshots have followed it by then.
SETTLE_SECONDS: Final = 1.0
# Seconds between checks for new snapshots.
CHECK_SECONDS: Final = 2.0
# Seconds between two searches for second copies to fetch.
SECOND_COPIES_SECONDS: Final = 10.0
# Longest wait in seconds for snapshots on their way from other nodes.
PENDING_SECONDS: Final = 30.0
# Seconds between reports of missing blocks to all other nodes.
PUBLISH_SECONDS: Final = 1.0


@dataclass(slots=True)
class _NodeResponses:
    gave: int = 0
    lacked: int = 0


@dataclass(slots=True, eq=False)
class _Pull:
    missing: MissingBlocks
    got: int = 0
    responses: defaultdict[str, _NodeResponses] = field(default_factory=lambda: defaultdict(_NodeResponses))
    # Places of blocks whose nodes could not be asked or were busy.
    to_retry: list[int] = field(default_factory=list)

    def has_no_blocks(self, node: str) -> bool:
        responses = self.responses.get(node)
        return responses is not None and not responses.gave and responses.lacked >= SAMPLED_BLOCKS // 4


class BlockPuller:
    """Pulls blocks into the store. Used on the event loop."""

    def __init__(
        self, membership: Membership, client: PeerClient, blocks: BlockStore, threads: Threads, bandwidth: int
    ) -> None:
        """bandwidth: bytes per second."""
        self.blocks = 0  # received so far
        self._membership = membership
        self._client = client
        self._blocks = blocks
        self._threads = threads
        self._bandwidth = bandwidth

    async def pull_blocks(self, missing: MissingBlocks, step: ReportProgress) -> int:
        """Pull the blocks and return how many arrived. Ends early if *step* returns False."""
        pull, indices = _Pull(missing), np.arange(len(missing.ids))
        if len(indices) > MIN_BLOCKS_TO_SAMPLE:
            sample = np.linspace(0, len(indices) - 1, SAMPLED_BLOCKS).astype(np.intp)
            if not await self._pull_in_batches(pull, sample, step):
                return pull.got
            indices = np.setdiff1d(indices, sample)
            worth = self._are_worth_requesting(pull, indices)
            left_out = missing.ids[indices[~worth]]
            if not step(len(left_out), int(missing.space.sizes[left_out].sum(dtype=np.int64))):
                return pull.got
            indices = indices[worth]
        for _ in range(MAX_RETRIES):
            if not await self._pull_in_batches(pull, indices, step) or not pull.to_retry:
                break
            indices, pull.to_retry = np.array(pull.to_retry, np.intp), []
            await asyncio.sleep(RETRY_SECONDS)
        return pull.got

    def _are_worth_requesting(self, pull: _Pull, indices: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Return which blocks may be on a node that has some of the sample."""
        me = self._membership.view.me
        worth = np.zeros(len(indices), np.bool_)
        for candidate in pull.missing.holder_candidates:
            candidates = {node for node in candidate.ids if node != me and not pull.has_no_blocks(node)}
            worth |= candidate.select(indices).are_among(candidates)
        return worth

    async def _pull_in_batches(self, pull: _Pull, indices: npt.NDArray[np.integer], step: ReportProgress) -> bool:
        """Pull blocks batch by batch. Returns False if the pull is to end."""
        loop, start = asyncio.get_running_loop(), 0
        most = min(BATCH_BYTES, MAX_BATCH_TIME * self._bandwidth)
        sizes = pull.missing.space.sizes[pull.missing.ids[indices]]
        while start < len(indices):
            ends = np.cumsum(sizes[start : start + BATCH_BLOCKS], dtype=np.int64)
            count = max(1, int(np.searchsorted(ends, most, "right")))
            began, before = loop.time(), len(pull.to_retry)
            size = await self._pull_batch(pull, indices[start : start + count].tolist())
            again = pull.missing.ids[pull.to_retry[before:]]
            left = int(pull.missing.space.sizes[again].sum(dtype=np.int64))
            if not step(count - len(again), int(ends[count - 1]) - left):
                return False
            await asyncio.sleep(max(0.0, began + size / self._bandwidth - loop.time()))
            start += count
        return True

    async def _pull_batch(self, pull: _Pull, indices: list[int]) -> int:
        """Pull one batch and return the bytes received."""
        lacks, me = pull.missing, self._membership.view.me
        ids = lacks.ids[indices]
        keys, (entries, numbers) = lacks.space.keys(ids), lacks.space.refs(ids)
        left: dict[int, BlockRequest] = {}
        for index, key, number, entry, block in zip(
            indices, keys, ids.tolist(), entries.tolist(), numbers.tolist(), strict=True
        ):
            if self._blocks.get(key) is None:  # otherwise a reader has fetched it
                ref = BlockRef(lacks.space.snapshot, entry, block)
                left[index] = BlockRequest(ref, key, int(lacks.space.sizes[number]))
        whom = {index: lacks.possible_holders(index, me) for index in left}
        came: list[BlockToStore] = []
        failed: set[int] = set()
        while left:
            requests = self._next_nodes(pull, left, whom, failed)
            responses = await self._request_batch(requests)
            for index, response in responses.items():
                self._count_response(pull, requests[index][0].id, response)
                if isinstance(response, PeerBlock):
                    one = left.pop(index)
                    failed.discard(index)
                    came.append(BlockToStore(one.key, response.data, False, lacks.space.snapshot, response.checksums))
                elif not isinstance(response, BlockNotFound):
                    failed.add(index)
        pull.to_retry += sorted(failed)
        if came:
            await self._threads.ahead(self._blocks.put_many, came)
        pull.got += len(came)
        self.blocks += len(came)
        return sum(len(one.data) for one in came)

    def _next_nodes(
        self, pull: _Pull, left: dict[int, BlockRequest], whom: dict[int, list[str]], failed: set[int]
    ) -> dict[int, tuple[NodeRecord, BlockRequest]]:
        """Return the node to ask next for each block. Blocks without any node left are removed from *left*."""
        requests: dict[int, tuple[NodeRecord, BlockRequest]] = {}
        for index in list(left):
            nodes = whom[index]
            while nodes and index not in requests:
                record = self._membership.view.get(name := nodes.pop(0))
                if record is None or record.state == "away" or pull.has_no_blocks(name):
                    continue
                if self._client.is_usable(name):
                    requests[index] = record, left[index]
                else:
                    failed.add(index)
            if index not in requests:
                del left[index]
        return requests

    @staticmethod
    def _count_response(pull: _Pull, node: str, response: PeerResponse) -> None:
        if isinstance(response, PeerBlock):
            pull.responses[node].gave += 1
        elif isinstance(response, BlockNotFound):
            pull.responses[node].lacked += 1

    async def _request_batch(self, requests: dict[int, tuple[NodeRecord, BlockRequest]]) -> dict[int, PeerResponse]:
        loop = asyncio.get_running_loop()
        how = RequestOptions(loop.time() + BATCH_TIMEOUT, is_ahead=True)
        waiting: list[asyncio.Future[PeerResponse]] = []
        for node, request in requests.values():
            future: asyncio.Future[PeerResponse] = loop.create_future()
            waiting.append(future)
            self._client.request_block(node, request, how, _result_setter(future))
        responses = await asyncio.gather(*waiting)
        return dict(zip(requests, responses, strict=True))


def _result_setter(future: "asyncio.Future[PeerResponse]") -> Callable[[PeerResponse], None]:
    def settle(response: PeerResponse) -> None:
        if not future.done():
            future.set_result(response)

    return settle


@dataclass(frozen=True, slots=True)
class RebalanceParts:
    """The parts of the node that the rebalance uses."""

    membership: Membership
    shared: SharedState
    client: PeerClient
    blocks: BlockStore
    plan: Plan
    standing: Ownership
    threads: Threads
    presence: Presence
    # Returns the snapshots of this node's datasets; and whether any is on its way from another node.
    snapshots: Callable[[], Iterable[Snapshot]]
    is_snapshot_pending: Callable[[], bool]
    # Returns the shared snapshot, if jobs read it.
    shared_snapshot: Callable[[str], SharedSnapshot | None]
    # Returns the free bytes of the tiers.
    free_bytes: Callable[[], int]
    replicas: int
    # Bytes per second.
    bandwidth: int


class Rebalance:
    """Fetches the blocks that this node has to keep after changes of the ring. Used on the event loop.

    Handles one snapshot at a time, as its block space may take as much memory as all other state of a node.
    """

    def __init__(self, parts: RebalanceParts, ring: PlacementRing) -> None:
        """ring: the current members."""
        self.blocks = 0  # left to fetch since the ring changed
        self.bytes = 0
        self._parts = parts
        self.second_copies = 0  # fetched since the daemon started
        self._search = MissingBlockSearch(parts.plan, parts.standing, parts.presence, parts.blocks, parts.threads)
        self._puller = BlockPuller(parts.membership, parts.client, parts.blocks, parts.threads, parts.bandwidth)
        self._ring = ring
        self._target_ring = PlacementRing(0, (), ())  # the ring for which the rebalance is running or done
        self._complete_ring = ring  # the last ring for which all blocks were moved
        self._done_snapshots: set[str] = set()  # snapshots done for that ring
        self._searched_snapshots: set[str] = set()  # snapshots for which lost blocks have been searched
        self._incomplete_snapshots: set[str] = set()  # snapshots that did not fit completely
        self._published_at = 0.0  # loop time of the last report
        self._ring_changed = asyncio.Event()
        self._ring_changed.set()  # initially, to find what is missing

    def set_ring(self, ring: PlacementRing) -> None:
        """Note the current members."""
        if ring.ids != self._ring.ids:
            self._ring_changed.set()
        self._ring = ring

    def is_searching(self, snapshot: str) -> bool:
        """Return whether other nodes may have blocks of the snapshot that this one lost, or that were fetched while it
        was away."""
        return snapshot not in self._searched_snapshots

    @property
    def fetched_blocks(self) -> int:
        """Blocks that the rebalance has fetched since the daemon started, without second copies."""
        return self._puller.blocks - self.second_copies

    async def run(self) -> None:
        """Rebalance after each change, as long as the daemon runs."""
        while True:
            await self._wait_for_work()
            if self._ring.ids != self._target_ring.ids:
                self._ring_changed.clear()
                await asyncio.sleep(SETTLE_SECONDS)
                if self._ring_changed.is_set():
                    continue
                self._target_ring, self._done_snapshots = self._ring, set()
                await self._wait_for_snapshots()
            self._ring_changed.clear()
            try:
                if await self._rebalance_after(self._complete_ring, self._target_ring):
                    self._complete_ring = self._target_ring
            except Exception:
                log.exception("the rebalance failed; missing blocks are fetched when they are read")
                self._done_snapshots = {snapshot.id for snapshot in self._parts.snapshots()}
            self.blocks = self.bytes = 0
            self._publish_status()

    async def _wait_for_work(self) -> None:
        """Wait until the ring changes, or a new snapshot appears; make second copies meanwhile."""
        second_copies_at = asyncio.get_running_loop().time() + SECOND_COPIES_SECONDS
        while not self._ring_changed.is_set():
            known = {snapshot.id for snapshot in self._parts.snapshots()}
            self._done_snapshots &= known
            if known - self._done_snapshots:
                return
            try:
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._ring_changed.wait()
            except TimeoutError:
                pass
            if asyncio.get_running_loop().time() >= second_copies_at and not self._ring_changed.is_set():
                is_done = await self._make_second_copies()
                second_copies_at = asyncio.get_running_loop().time() + SECOND_COPIES_SECONDS * is_done

    async def _make_second_copies(self) -> bool:
        """Fetch missing second copies of hot snapshots from other nodes, until the ring changes, and no longer than
        SECOND_COPIES_SECONDS, as new snapshots go first. Returns whether no more are left."""
        loop = asyncio.get_running_loop()
        until = loop.time() + SECOND_COPIES_SECONDS
        for snapshot in [one.id for one in self._parts.snapshots()]:
            shared = self._parts.shared_snapshot(snapshot)
            try:
                missing = (
                    await self._search.find_second_copies(shared, self._parts.free_bytes())
                    if shared is not None and shared.is_hot
                    else None
                )
                if missing is not None:
                    before = self._puller.blocks
                    await self._puller.pull_blocks(
                        missing, lambda blocks, size: not self._ring_changed.is_set() and loop.time() < until
                    )
                    self.second_copies += self._puller.blocks - before
            except Exception:
                log.exception("second copies of snapshot %s could not be made", snapshot)
        return loop.time() < until

    async def _wait_for_snapshots(self) -> None:
        """Wait until no snapshot is on its way from another node, for at most PENDING_SECONDS."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PENDING_SECONDS
        while self._parts.is_snapshot_pending() and loop.time() < until and not self._ring_changed.is_set():  # noqa: ASYNC110 - no event
            await asyncio.sleep(SETTLE_SECONDS / 10)

    def _publish_status(self) -> None:
        self._published_at = asyncio.get_running_loop().time()
        facts = RebalanceFacts(ring_digest(self._target_ring.ids), self.blocks, self.bytes)
        self._parts.shared.publish(REBALANCE, REBALANCE_NAME, facts)

    async def _rebalance_after(self, complete: PlacementRing, now: PlacementRing) -> bool:
        """Fetch missing blocks. complete: the last ring for which all blocks were moved. Returns False if the ring
        changes before the end."""
        parts = self._parts
        change = RingChange(complete, now, parts.membership.view.me, parts.replicas)
        new = [snapshot for snapshot in parts.snapshots() if snapshot.id not in self._done_snapshots]
        lost = [one for one in new if one.id not in self._searched_snapshots]
        self._incomplete_snapshots &= {snapshot.id for snapshot in parts.snapshots()}
        if change.me in now.ids:
            moved = [one for one in new if await self._count_moved_blocks(one, change)]
            self._publish_status()
            if self.blocks:
                what = f"{self.blocks:,} blocks ({format_size(self.bytes)})"
                log.info("rebalance: fetching %s that other nodes have kept until now", what)
            # Moved blocks come first: a draining node waits for them.
            if not (
                await self._pull_all(moved, change, moved=True) and await self._pull_all(lost, change, moved=False)
            ):
                return False
            known = {snapshot.id for snapshot in parts.snapshots()}
            self._searched_snapshots = known & (
                self._searched_snapshots | ({one.id for one in lost} - self._incomplete_snapshots)
            )
        self._done_snapshots |= {one.id for one in new}
        return True

    async def _count_moved_blocks(self, snapshot: Snapshot, change: RingChange) -> bool:
        """Count the blocks of a snapshot to move here, and return whether there are any."""
        lacks = await self._find_missing(snapshot, change, moved=True)
        if lacks is not None:
            self.blocks, self.bytes = self.blocks + len(lacks.ids), self.bytes + lacks.size
        return lacks is not None

    async def _pull_all(self, snapshots: Sequence[Snapshot], change: RingChange, *, moved: bool) -> bool:
        """Pull the missing blocks of the snapshots. Returns False if the ring changes before the end."""
        got = 0
        for snapshot in snapshots:
            lacks = await self._find_missing(snapshot, change, moved=moved)
            if self._ring_changed.is_set():
                return False
            if lacks is not None:
                got += await self._puller.pull_blocks(
                    lacks, self._note_moved if moved else partial(self._has_room, snapshot.id)
                )
        if got:
            log.info("rebalance: fetched %d blocks from other nodes", got)
        return not self._ring_changed.is_set()

    async def _find_missing(self, snapshot: Snapshot, change: RingChange, *, moved: bool) -> MissingBlocks | None:
        try:
            return await self._search.find_missing(
                snapshot, self._parts.shared_snapshot(snapshot.id), change, moved=moved
            )
        except CachefsError as error:
            log.warning("snapshot %s is left out of the rebalance: %s", snapshot.id, error)
            return None

    def _note_moved(self, blocks: int, size: int) -> bool:
        """Subtract handled blocks, and return whether to go on."""
        self.blocks, self.bytes = max(0, self.blocks - blocks), max(0, self.bytes - size)
        if asyncio.get_running_loop().time() - self._published_at >= PUBLISH_SECONDS:
            self._publish_status()
        return not self._ring_changed.is_set()

    def _has_room(self, snapshot: str, blocks: int, size: int) -> bool:
        """Return whether to go on with blocks that were this node's before: none is evicted for them."""
        if self._parts.free_bytes() <= size:
            self._incomplete_snapshots.add(snapshot)
            return False
        return not self._ring_changed.is_set()
