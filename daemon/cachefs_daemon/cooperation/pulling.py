"""Pulls missing blocks from the nodes that may have them, one node after the other, within a bandwidth limit."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.messages import BlockRef
from cachefs_daemon.cluster.membership import Membership
from cachefs_daemon.cluster.view import NodeRecord
from cachefs_daemon.cooperation.lacking import Lacks
from cachefs_daemon.peers.answers import How, NotHere, PeerAnswer, PeerBlock, Wanted
from cachefs_daemon.peers.client import PeerClient
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore, Put

# Blocks per batch, and their bytes.
BATCH: Final = 64
BATCH_BYTES: Final = 16 << 20
# Longest time of a batch at full bandwidth, in seconds (except for a single block): avoids bursts.
BATCH_PART: Final = 0.25
# Timeout of a batch, in seconds.
BATCH_SECONDS: Final = 20.0
# Blocks of a sample, evenly spread, that is asked for first if there are at least MANY. A node that has none of the
# sample is not asked for the rest: a dataset that no node has read yet would cost millions of requests.
SAMPLE: Final = 256
MANY: Final = 4 * SAMPLE
# Retries of blocks whose nodes could not be asked or were busy; and seconds before each.
TURNS: Final = 3
PAUSE: Final = 2.0

# Called with handled blocks and bytes; returns whether to go on.
Step = Callable[[int, int], bool]


@dataclass(slots=True)
class _Answers:
    gave: int = 0
    lacked: int = 0


@dataclass(slots=True, eq=False)
class _Pull:
    lacks: Lacks
    got: int = 0
    answers: defaultdict[str, _Answers] = field(default_factory=lambda: defaultdict(_Answers))
    # Places of blocks whose nodes could not be asked or were busy.
    again: list[int] = field(default_factory=list)

    def is_empty(self, node: str) -> bool:
        answers = self.answers.get(node)
        return answers is not None and not answers.gave and answers.lacked >= SAMPLE // 4


class Pulling:
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

    async def pull(self, lacks: Lacks, step: Step) -> int:
        """Pull the blocks and return how many arrived. Ends early if *step* returns False."""
        pull, places = _Pull(lacks), np.arange(len(lacks.ids))
        if len(places) > MANY:
            sample = np.linspace(0, len(places) - 1, SAMPLE).astype(np.intp)
            if not await self._pull(pull, sample, step):
                return pull.got
            places = np.setdiff1d(places, sample)
            worth = self._worth_asking(pull, places)
            left_out = lacks.ids[places[~worth]]
            if not step(len(left_out), int(lacks.space.sizes[left_out].sum(dtype=np.int64))):
                return pull.got
            places = places[worth]
        for _ in range(TURNS):
            if not await self._pull(pull, places, step) or not pull.again:
                break
            places, pull.again = np.array(pull.again, np.intp), []
            await asyncio.sleep(PAUSE)
        return pull.got

    def _worth_asking(self, pull: _Pull, places: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Return which blocks may be on a node that has some of the sample."""
        me = self._membership.view.me
        worth = np.zeros(len(places), np.bool_)
        for one in pull.lacks.others:
            asked = {node for node in one.ids if node != me and not pull.is_empty(node)}
            worth |= one.part(places).among(asked)
        return worth

    async def _pull(self, pull: _Pull, places: npt.NDArray[np.integer], step: Step) -> bool:
        """Pull blocks batch by batch. Returns False if the pull is to end."""
        loop, start = asyncio.get_running_loop(), 0
        most = min(BATCH_BYTES, BATCH_PART * self._bandwidth)
        sizes = pull.lacks.space.sizes[pull.lacks.ids[places]]
        while start < len(places):
            ends = np.cumsum(sizes[start : start + BATCH], dtype=np.int64)
            count = max(1, int(np.searchsorted(ends, most, "right")))
            began, before = loop.time(), len(pull.again)
            size = await self._batch(pull, places[start : start + count].tolist())
            again = pull.lacks.ids[pull.again[before:]]
            left = int(pull.lacks.space.sizes[again].sum(dtype=np.int64))
            if not step(count - len(again), int(ends[count - 1]) - left):
                return False
            await asyncio.sleep(max(0.0, began + size / self._bandwidth - loop.time()))
            start += count
        return True

    async def _batch(self, pull: _Pull, places: list[int]) -> int:
        """Pull one batch and return the bytes received."""
        lacks, me = pull.lacks, self._membership.view.me
        ids = lacks.ids[places]
        keys, (entries, numbers) = lacks.space.keys(ids), lacks.space.refs(ids)
        wanted: dict[int, Wanted] = {}
        for place, key, number, entry, block in zip(
            places, keys, ids.tolist(), entries.tolist(), numbers.tolist(), strict=True
        ):
            if self._blocks.get(key) is None:  # otherwise a reader has fetched it
                ref = BlockRef(lacks.space.snapshot, entry, block)
                wanted[place] = Wanted(ref, key, int(lacks.space.sizes[number]))
        whom = {place: lacks.whom(place, me) for place in wanted}
        came: list[Put] = []
        failed: set[int] = set()
        while wanted:
            asked = self._next(pull, wanted, whom, failed)
            answers = await self._ask(asked)
            for place, answer in answers.items():
                self._note(pull, asked[place][0].id, answer)
                if isinstance(answer, PeerBlock):
                    one = wanted.pop(place)
                    failed.discard(place)
                    came.append(Put(one.key, answer.data, False, lacks.space.snapshot, answer.checksums))
                elif not isinstance(answer, NotHere):
                    failed.add(place)
        pull.again += sorted(failed)
        if came:
            await self._threads.ahead(self._blocks.put_many, came)
        pull.got += len(came)
        self.blocks += len(came)
        return sum(len(one.data) for one in came)

    def _next(
        self, pull: _Pull, wanted: dict[int, Wanted], whom: dict[int, list[str]], failed: set[int]
    ) -> dict[int, tuple[NodeRecord, Wanted]]:
        """Return the node to ask next for each block. Blocks without any node left are removed from *wanted*."""
        asked: dict[int, tuple[NodeRecord, Wanted]] = {}
        for place in list(wanted):
            nodes = whom[place]
            while nodes and place not in asked:
                record = self._membership.view.get(name := nodes.pop(0))
                if record is None or record.state == "away" or pull.is_empty(name):
                    continue
                if self._client.usable(name):
                    asked[place] = record, wanted[place]
                else:
                    failed.add(place)
            if place not in asked:
                del wanted[place]
        return asked

    @staticmethod
    def _note(pull: _Pull, node: str, answer: PeerAnswer) -> None:
        if isinstance(answer, PeerBlock):
            pull.answers[node].gave += 1
        elif isinstance(answer, NotHere):
            pull.answers[node].lacked += 1

    async def _ask(self, asked: dict[int, tuple[NodeRecord, Wanted]]) -> dict[int, PeerAnswer]:
        loop = asyncio.get_running_loop()
        how = How(loop.time() + BATCH_SECONDS, ahead=True)
        waiting: list[asyncio.Future[PeerAnswer]] = []
        for node, wanted in asked.values():
            future: asyncio.Future[PeerAnswer] = loop.create_future()
            waiting.append(future)
            self._client.ask(node, wanted, how, _settling(future))
        answers = await asyncio.gather(*waiting)
        return dict(zip(asked, answers, strict=True))


def _settling(future: "asyncio.Future[PeerAnswer]") -> Callable[[PeerAnswer], None]:
    def settle(answer: PeerAnswer) -> None:
        if not future.done():
            future.set_result(answer)

    return settle
