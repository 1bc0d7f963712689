"""Pulls missing blocks from the nodes that may have them, one node after the other, within a bandwidth limit."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.messages import BlockRef
from cachefs_cluster.membership.membership import Membership
from cachefs_cluster.membership.view import NodeRecord
from cachefs_cluster.peers.client import PeerClient
from cachefs_cluster.peers.peer_requests import BlockNotFound, BlockRequest, PeerBlock, PeerResponse, RequestOptions
from cachefs_cluster.placement.missing_blocks import MissingBlocks
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
            worth = self._worth_asking(pull, indices)
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

    def _worth_asking(self, pull: _Pull, indices: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Return which blocks may be on a node that has some of the sample."""
        me = self._membership.view.me
        worth = np.zeros(len(indices), np.bool_)
        for one in pull.missing.holder_candidates:
            candidates = {node for node in one.ids if node != me and not pull.has_no_blocks(node)}
            worth |= one.select(indices).are_among(candidates)
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
        wanted: dict[int, BlockRequest] = {}
        for index, key, number, entry, block in zip(
            indices, keys, ids.tolist(), entries.tolist(), numbers.tolist(), strict=True
        ):
            if self._blocks.get(key) is None:  # otherwise a reader has fetched it
                ref = BlockRef(lacks.space.snapshot, entry, block)
                wanted[index] = BlockRequest(ref, key, int(lacks.space.sizes[number]))
        whom = {index: lacks.possible_holders(index, me) for index in wanted}
        came: list[BlockToStore] = []
        failed: set[int] = set()
        while wanted:
            requests = self._next_nodes(pull, wanted, whom, failed)
            responses = await self._request_batch(requests)
            for index, response in responses.items():
                self._count_response(pull, requests[index][0].id, response)
                if isinstance(response, PeerBlock):
                    one = wanted.pop(index)
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
        self, pull: _Pull, wanted: dict[int, BlockRequest], whom: dict[int, list[str]], failed: set[int]
    ) -> dict[int, tuple[NodeRecord, BlockRequest]]:
        """Return the node to ask next for each block. Blocks without any node left are removed from *wanted*."""
        requests: dict[int, tuple[NodeRecord, BlockRequest]] = {}
        for index in list(wanted):
            nodes = whom[index]
            while nodes and index not in requests:
                record = self._membership.view.get(name := nodes.pop(0))
                if record is None or record.state == "away" or pull.has_no_blocks(name):
                    continue
                if self._client.is_usable(name):
                    requests[index] = record, wanted[index]
                else:
                    failed.add(index)
            if index not in requests:
                del wanted[index]
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
        for node, wanted in requests.values():
            future: asyncio.Future[PeerResponse] = loop.create_future()
            waiting.append(future)
            self._client.request_block(node, wanted, how, _result_setter(future))
        responses = await asyncio.gather(*waiting)
        return dict(zip(requests, responses, strict=True))


def _result_setter(future: "asyncio.Future[PeerResponse]") -> Callable[[PeerResponse], None]:
    def settle(response: PeerResponse) -> None:
        if not future.done():
            future.set_result(response)

    return settle
