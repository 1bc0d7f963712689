"""Executes the commands of schedulers."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from cachefs.errors import Busy, CachefsError, ConfigError
from cachefs.messages import DatasetLimit, Selection
from cachefs.observe_messages import CommandKind, NodeCommand, NodeCommandResult
from cachefs_cluster.reporting.shard_warmups import ShardWarmups
from cachefs_daemon.content import inventory
from cachefs_daemon.content.pins import Pins
from cachefs_daemon.content.quotas import DatasetQuotas
from cachefs_daemon.datasets import selection
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import Storage

log = logging.getLogger(__name__)

# Commands that run at the same time; each walks through a snapshot.
MAX_CONCURRENT: Final = 4


@dataclass(frozen=True, slots=True)
class CommandContext:
    """The parts of the node that commands use."""

    catalog: Catalog
    pins: Pins
    quotas: DatasetQuotas
    storage: Storage
    threads: Threads
    warmups: ShardWarmups
    # Drains this node from its cluster. Raises ConfigError.
    drain: Callable[[], Awaitable[object]]


class CommandExecutor:
    """Executes commands. Used on the event loop."""

    def __init__(self, context: CommandContext) -> None:
        self._context = context
        self._running = 0

    async def execute(self, command: NodeCommand, who: str) -> NodeCommandResult:
        """Execute a command. who: the name of the scheduler. Raises CachefsError."""
        if self._running >= MAX_CONCURRENT:
            raise Busy(f"{self._running} commands of schedulers are in progress; try again later")
        log.info(
            "scheduler %s commands %s %s%s",
            who,
            command.kind,
            command.dataset,
            f" ({command.id})" if command.id else "",
        )
        self._running += 1
        try:
            return await self._execute(command)
        except CachefsError as error:
            log.warning("command of scheduler %s failed: %s %s: %s", who, command.kind, command.dataset, error)
            raise
        finally:
            self._running -= 1

    async def _execute(self, command: NodeCommand) -> NodeCommandResult:
        means = self._context
        if command.kind == CommandKind.DRAIN:
            await means.drain()
            return NodeCommandResult()
        if command.kind == CommandKind.STOP:
            means.warmups.stop(command.id)
            return NodeCommandResult()
        snapshot = means.catalog.snapshot(command.dataset)
        if command.kind == CommandKind.WARM:
            return await means.warmups.begin(command, snapshot)
        if command.kind == CommandKind.LIMIT:
            if command.share is None and command.ttl is None:
                raise ConfigError("a limit has a share or a ttl")
            await means.quotas.change_limits(DatasetLimit(name=command.dataset, share=command.share, ttl=command.ttl))
            return NodeCommandResult()
        if command.kind == CommandKind.PIN:
            return NodeCommandResult(bytes=(await means.pins.pin(Selection(dataset=command.dataset))).bytes)
        if command.kind == CommandKind.UNPIN:
            return NodeCommandResult(bytes=(await means.pins.unpin(Selection(dataset=command.dataset))).bytes)
        storage = means.storage
        files = await means.threads.background(selection.files, snapshot, [])
        freed = await means.threads.background(inventory.evict, storage.blocks, storage.index, files)
        return NodeCommandResult(freed.blocks, freed.bytes)
