"""Executes the commands of schedulers."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from cachefs.errors import Busy, CachefsError, ConfigError
from cachefs.messages import DatasetLimit, Selection
from cachefs.observe_messages import Order, OrderDone, OrderKind
from cachefs_daemon.content import inventory
from cachefs_daemon.content.pins import Pins
from cachefs_daemon.content.quotas import DatasetQuotas
from cachefs_daemon.datasets import selection
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.reporting.shard_warmups import ShardWarmups
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import Storage

log = logging.getLogger(__name__)

# Commands that run at the same time; each walks through a snapshot.
MOST_AT_ONCE: Final = 4


@dataclass(frozen=True, slots=True)
class Means:
    """The parts of the node that commands use."""

    catalog: Catalog
    pins: Pins
    quotas: DatasetQuotas
    storage: Storage
    threads: Threads
    warmups: ShardWarmups
    # Drains this node from its cluster. Raises ConfigError.
    drain: Callable[[], Awaitable[object]]


class Orders:
    """Executes commands. Used on the event loop."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._running = 0

    async def carry_out(self, order: Order, who: str) -> OrderDone:
        """Execute a command. who: the name of the scheduler. Raises CachefsError."""
        if self._running >= MOST_AT_ONCE:
            raise Busy(f"{self._running} orders of schedulers are being carried out; try again later")
        log.info("scheduler %s orders: %s %s%s", who, order.kind, order.dataset, f" ({order.id})" if order.id else "")
        self._running += 1
        try:
            return await self._carry_out(order)
        except CachefsError as error:
            log.warning("order of scheduler %s failed: %s %s: %s", who, order.kind, order.dataset, error)
            raise
        finally:
            self._running -= 1

    async def _carry_out(self, order: Order) -> OrderDone:
        means = self._means
        if order.kind == OrderKind.DRAIN:
            await means.drain()
            return OrderDone()
        if order.kind == OrderKind.STOP:
            means.warmups.stop(order.id)
            return OrderDone()
        snapshot = means.catalog.snapshot(order.dataset)
        if order.kind == OrderKind.WARM:
            return await means.warmups.begin(order, snapshot)
        if order.kind == OrderKind.LIMIT:
            if order.share is None and order.ttl is None:
                raise ConfigError("a limit has a share or a ttl")
            await means.quotas.change(DatasetLimit(name=order.dataset, share=order.share, ttl=order.ttl))
            return OrderDone()
        if order.kind == OrderKind.PIN:
            return OrderDone(bytes=(await means.pins.pin(Selection(dataset=order.dataset))).bytes)
        if order.kind == OrderKind.UNPIN:
            return OrderDone(bytes=(await means.pins.unpin(Selection(dataset=order.dataset))).bytes)
        storage = means.storage
        files = await means.threads.background(selection.files, snapshot, [])
        freed = await means.threads.background(inventory.evict, storage.blocks, storage.index, files)
        return OrderDone(freed.blocks, freed.bytes)
