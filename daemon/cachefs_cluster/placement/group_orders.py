"""Converts the reads of a group in an epoch into blocks."""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from cachefs.planning.blocks.space import Ids, Samples
from cachefs.planning.sequences.sampler import EpochOrder, epoch_order
from cachefs_cluster.placement.groups import ConsumerGroup, GroupMember
from cachefs_daemon.jobs.consumer_reads import CHEAP_SAMPLES, OVERSIZE_FACTOR
from cachefs_daemon.runtime.threads import Threads

log = logging.getLogger(__name__)

# Epochs whose published orders are kept as blocks: the decision about copies asks for each several times.
_MAX_CACHED_EPOCHS: Final = 4
# Most jobs for which a bad order is logged.
_MAX_LOGGED_JOBS: Final = 100
# Largest ratio of blocks, counted once per reader, to distinct blocks if the reads are shared out: torch's samplers pad
# the shares of ranks.
_MAX_OVERLAP: Final = 1.1
# Node id, and the blocks that one of its consumers reads, in order: shape (reads,), int32.
Orders = list[tuple[str, Ids]]
# Fetches a consumer's published order of an epoch, as sample numbers: shape (samples,), uint32. Raises CachefsError.
LoadOrder = Callable[[GroupMember, int], Awaitable[EpochOrder]]


def is_epoch_known(group: ConsumerGroup, epoch: int) -> bool:
    """Return whether the reads of all members in that epoch are known."""
    if group.spec is not None:
        return epoch < group.spec.epochs
    return all(any(one.epoch == epoch for one in member.facts.orders) for member in group.members)


def is_shared_out(orders: Orders) -> bool:
    """Return whether almost every block has a single reader. Otherwise its holder makes no difference."""
    everything = np.concatenate([blocks for _, blocks in orders]) if orders else np.zeros(0, np.int32)
    union = len(np.unique(everything))
    if len(everything) <= _MAX_OVERLAP * union:
        return True
    return sum(len(np.unique(blocks)) for _, blocks in orders) <= _MAX_OVERLAP * union + len(orders)


def published_samples(group: ConsumerGroup, epoch: int) -> int:
    """Return the samples in the orders that members have published for that epoch."""
    return sum(one.samples for member in group.members for one in member.facts.orders if one.epoch == epoch)


def is_last(group: ConsumerGroup, epoch: int) -> bool:
    """Return whether the epoch is known to be the last."""
    return group.spec is not None and epoch >= group.spec.epochs - 1


class GroupOrders:
    """Computes and caches the orders of groups. Used on the event loop; computes in threads."""

    def __init__(self, threads: Threads, load_order: LoadOrder) -> None:
        self._threads = threads
        self._load_order = load_order
        self._cached_orders: OrderedDict[tuple[object, ...], Orders] = (
            OrderedDict()
        )  # published orders, the latest last
        self._logged_jobs: set[str] = set()  # jobs whose bad orders have been logged

    async def orders_of(self, group: ConsumerGroup, samples: Mapping[str, Samples], epoch: int) -> Orders:
        """Return the orders of all members whose order in that epoch is known. samples: by digest of the sample map.
        Raises CachefsError.

        A permutation shared by ranks is computed once for all: 40 ms per million samples, however many ranks.
        """
        if group.spec is not None:
            own = samples[group.maps[0]]
            if not is_epoch_known(group, epoch) or self._is_oversized(group, group.spec.size, own):
                return []
            return await self._threads.planning(_compute_orders, group, own, epoch)
        refs = [(member, one) for member in group.members for one in member.facts.orders if one.epoch == epoch]
        key = tuple((member.node, member.facts.map, one.digest) for member, one in refs)
        known = self._cached_orders.get(key)
        if known is None:
            known = []
            for member, one in refs:
                own = samples[member.facts.map]
                if not self._is_oversized(group, one.samples, own):
                    order = await self._load_order(member, epoch)
                    reads = await self._threads.planning(own.reads_in_order, order)
                    known.append((member.node, reads.blocks))
        self._cached_orders[key] = known
        self._cached_orders.move_to_end(key)
        while len(self._cached_orders) > _MAX_CACHED_EPOCHS:
            self._cached_orders.popitem(last=False)
        return known

    def _is_oversized(self, group: ConsumerGroup, size: int, samples: Samples) -> bool:
        """Return whether an order is larger than any job of this node may have. Such an order is not planned, while
        other jobs still are: the data of another node is untrusted."""
        if size <= max(CHEAP_SAMPLES, OVERSIZE_FACTOR * len(samples)):
            return False
        if group.job not in self._logged_jobs and len(self._logged_jobs) < _MAX_LOGGED_JOBS:
            self._logged_jobs.add(group.job)
            log.warning(
                "job %s has an order of %d samples of snapshot %s, which has %d: the order is ignored",
                group.job, size, group.snapshot, len(samples),
            )  # fmt: skip
        return True


def _compute_orders(group: ConsumerGroup, samples: Samples, epoch: int) -> Orders:
    spec = group.spec
    assert spec is not None
    if spec.replicas == 1:
        order = epoch_order(spec, epoch)
        return [(member.node, samples.reads_in_order(order).blocks) for member in group.members]
    # The remainder of a permutation that does not divide evenly is read too, or padded: a few samples.
    everyone = epoch_order(replace(spec, replicas=1, rank=0, drop_last=False), epoch)
    share = spec.size // spec.replicas if spec.drop_last else -(-spec.size // spec.replicas)
    found: Orders = []
    for member in group.members:
        rank = member.facts.spec.rank if member.facts.spec is not None else 0
        own = everyone[rank : share * spec.replicas : spec.replicas]
        found.append((member.node, samples.reads_in_order(np.ascontiguousarray(own)).blocks))
    return found
