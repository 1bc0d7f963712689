"""Publishes the consumers of this node to other nodes: how each will read, and its position."""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Final

import msgspec

from cachefs.job_messages import JobPublication, SampleMap
from cachefs.planning.sequences.sampler import EpochOrder
from cachefs.sizes import format_size
from cachefs_cluster.sharing.blobs import MAX_BLOB, SharedBlobs
from cachefs_cluster.sharing.sections import (
    CONSUMERS,
    MAX_ORDERS,
    PROGRESS,
    ConsumerFacts,
    ConsumerProgress,
    OrderRef,
)
from cachefs_cluster.sharing.state import SharedState
from cachefs_daemon.consumer_checks import consumer_name
from cachefs_daemon.jobs.consumer import Consumer
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.jobs.sample_maps import TREE

log = logging.getLogger(__name__)

# Seconds between two checks for changes, and between two updates of positions.
CHECK_SECONDS: Final = 0.25
PROGRESS_SECONDS: Final = 1.0
# Seconds after which a rejected consumer is published again: this node may publish less by then.
RETRY_SECONDS: Final = 10.0


@dataclass(slots=True)
class _PublishedConsumer:
    """Records which facts of a consumer were published to other nodes."""

    # By epoch: the order, and the reference by which other nodes ask for it.
    orders: dict[int, tuple[EpochOrder, OrderRef]] = field(default_factory=dict)
    # Digest and bytes of its sample map; None: not computed yet.
    map: tuple[str, int] | None = None
    # What was published last, and its inputs: if these are the same objects, nothing is new.
    facts: ConsumerFacts | None = None
    request: JobPublication | None = None
    published_orders: dict[int, EpochOrder] = field(default_factory=dict)
    # Monotonic seconds when rejected facts are published again; 0: they were accepted.
    retry_at: float = 0.0


class SharedConsumers:
    """Publishes consumers to other nodes. Used on the event loop."""

    def __init__(self, jobs: JobRegistry, shared: SharedState, blobs: SharedBlobs) -> None:
        self._jobs = jobs
        self._shared = shared
        self._blobs = blobs
        self._published: dict[str, _PublishedConsumer] = {}  # by key of the consumer
        # Maps of present consumers, with their digests and sizes: all ranks may have the same map.
        self._maps: list[tuple[SampleMap, tuple[str, int]]] = []

    async def run(self) -> None:
        """Publish changes and positions, as long as the daemon runs."""
        placed = 0.0
        while True:
            try:
                await self._publish_changes()
                if time.monotonic() - placed >= PROGRESS_SECONDS:
                    placed = time.monotonic()
                    self._publish_positions()
            except Exception:
                log.exception("the consumers of this node could not be published to other nodes; trying again")
            await asyncio.sleep(CHECK_SECONDS)

    async def _publish_changes(self) -> None:
        consumers = {_published_name(one): one for one in self._jobs.consumers}
        for name in self._shared.published_names(CONSUMERS):
            if name not in consumers:
                self._shared.remove(CONSUMERS, name)
                self._shared.remove(PROGRESS, name)
        for name, consumer in consumers.items():
            await self._publish_consumer(name, consumer)
        keys = {one.key for one in consumers.values()}
        if not self._published.keys() <= keys:
            self._published = {key: state for key, state in self._published.items() if key in keys}
            maps = [one.sample_map for one in consumers.values()]
            self._maps = [known for known in self._maps if any(known[0] is one for one in maps)]
        wanted = {ref.digest for state in self._published.values() for _, ref in state.orders.values()}
        self._blobs.keep_only(wanted | {digest for _, (digest, _) in self._maps})

    async def _publish_consumer(self, name: str, consumer: Consumer) -> None:
        state = self._published.setdefault(consumer.key, _PublishedConsumer())
        published, now = consumer.published_orders, time.monotonic()
        is_due = 0 < state.retry_at <= now
        if state.request is consumer.request and _are_same(state.published_orders, published) and not is_due:
            return
        if state.map is None:
            state.map = await self._map_digest(consumer)
        facts = await self._facts_of(consumer, state, published, state.map)
        state.request, state.published_orders = consumer.request, published
        if facts == state.facts and not is_due:
            return
        if facts.map_size > MAX_BLOB:
            size, most = format_size(facts.map_size), format_size(MAX_BLOB)
            refusal = f"its sample map has {size}, and other nodes accept at most {most}"
            if state.facts is None:
                log.warning("consumer %s is not published to other nodes: %s", name, refusal)
        else:
            refusal = self._shared.publish(CONSUMERS, name, facts)
        state.facts, state.retry_at = facts, now + RETRY_SECONDS if refusal else 0.0
        consumer.note_unshared(refusal)

    def _publish_positions(self) -> None:
        for consumer in self._jobs.consumers:
            name, position = _published_name(consumer), consumer.epoch_position
            if position is not None and self._shared.publishes(CONSUMERS, name):
                self._shared.publish(PROGRESS, name, ConsumerProgress(*position, round(consumer.rate, 3)))

    async def _facts_of(
        self,
        consumer: Consumer,
        state: _PublishedConsumer,
        published: dict[int, EpochOrder],
        sample_map: tuple[str, int],
    ) -> ConsumerFacts:
        request = consumer.request
        return ConsumerFacts(
            job=request.job,
            consumer=request.consumer,
            dataset=request.dataset,
            snapshot=consumer.snapshot.id,
            rank=request.rank,
            world_size=request.world_size,
            spec=request.spec,
            orders=await self._order_refs(published, state),
            map=sample_map[0],
            map_size=sample_map[1],
            workers=request.workers,
            batch_size=request.batch_size,
            prefetch=request.prefetch,
        )

    async def _order_refs(self, published: dict[int, EpochOrder], state: _PublishedConsumer) -> list[OrderRef]:
        nearest = sorted(published)[:MAX_ORDERS]
        known: dict[int, tuple[EpochOrder, OrderRef]] = {}
        for epoch in nearest:
            order = published[epoch]
            before = state.orders.get(epoch)
            if before is None or before[0] is not order:
                data = order.astype("<u4", copy=False).data
                digest, size = await self._blobs.add_blob(lambda data=data: data, 4)  # type: ignore[misc]
                before = order, OrderRef(epoch, digest, size // 4)
            known[epoch] = before
        state.orders = known
        return [ref for _, ref in known.values()]

    async def _map_digest(self, consumer: Consumer) -> tuple[str, int]:
        sample_map = consumer.sample_map
        if sample_map is TREE or sample_map == TREE:
            return "", 0
        for known, called in self._maps:
            if known is sample_map:
                return called
        called = await self._blobs.add_blob(lambda: msgspec.msgpack.encode(sample_map))
        self._maps.append((sample_map, called))
        return called


def _are_same(before: dict[int, EpochOrder], now: dict[int, EpochOrder]) -> bool:
    """Return whether both have the same array objects. Their contents are not compared."""
    return len(before) == len(now) and all(before.get(epoch) is order for epoch, order in now.items())


def _published_name(consumer: Consumer) -> str:
    return consumer_name(consumer.request.job, consumer.name)
