"""Warm-ups that this service orders on nodes: before jobs start, for additional copies, and when jobs move."""

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachefs.backoff import Backoff
from cachefs.observe_messages import CommandedWarmup, CommandKind, NodeCommand, NodeCommandResult
from cachefs.planning.blocks.presence import SHARDS
from cachefs_scheduler.view.observer_client import NodeRequestFailed, ObserverClient
from cachefs_scheduler.view.reported_cluster import ReportedCluster

log = logging.getLogger(__name__)

# Warm-ups in progress at once, and warm-ups remembered in all.
MAX_RUNNING: Final = 1024
MAX_KNOWN: Final = 2048
# Other commands in progress at once.
MAX_COMMANDS: Final = 64
# Attempts to send a command to a node, and the pause before the second attempt in seconds; pauses double.
TRIES: Final = 5
FIRST_PAUSE: Final = 0.5
# Seconds after which a warm-up counts as lost: UNREPORTED_SECONDS if its node reports without naming it, as after a
# restart of the daemon; SILENT_SECONDS if its node is silent. A lost warm-up must not count forever, neither as in
# progress nor as a copy.
UNREPORTED_SECONDS: Final = 60.0
SILENT_SECONDS: Final = 600.0
_END_STATES: Final = ("done", "failed", "stopped", "cancelled")


@dataclass(slots=True)
class NodeWarmup:
    """A warm-up on one node."""

    id: str
    node: str
    dataset: str
    snapshot: str
    # preload, clone or move.
    purpose: str
    job: str
    # None: all shards.
    shards: npt.NDArray[np.bool_] | None
    state: str = "ordered"
    blocks: int = 0
    total: int = 0
    message: str = ""
    # Monotonic seconds when the node last reported the warm-up.
    reported_at: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.state in _END_STATES


class NodeWarmups:
    """Starts, follows and stops warm-ups. Used on the event loop."""

    def __init__(
        self, view: ReportedCluster, client: ObserverClient, reason_to_send_nothing: Callable[[], str]
    ) -> None:
        """reason_to_send_nothing: returns why this service must not send commands now, or "" if it may."""
        self._view = view
        self._client = client
        self.reason_to_send_nothing = reason_to_send_nothing
        self._known: dict[str, NodeWarmup] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = 0
        # Called whenever a warm-up has ended.
        self._end_listeners: list[Callable[[NodeWarmup], None]] = []
        view.listeners.append(self._record_progress)

    def add_end_listener(self, listener: Callable[[NodeWarmup], None]) -> None:
        """Call *listener* with each warm-up that has ended."""
        self._end_listeners.append(listener)

    def _note_end(self, one: NodeWarmup) -> None:
        for listener in self._end_listeners:
            listener(one)

    @property
    def can_send(self) -> bool:
        """Return whether `send_command` would send a command now."""
        return not self.reason_to_send_nothing() and self._sending < MAX_COMMANDS

    def __iter__(self) -> Iterator[NodeWarmup]:
        return iter(list(self._known.values()))

    def begin_warmup(self, warmup: NodeWarmup) -> bool:
        """Start a warm-up unless one with its id is known. Returns whether it is in progress."""
        if self.reason_to_send_nothing():
            return False
        known = self._known.get(warmup.id)
        if known is not None:
            return not known.is_over
        if sum(1 for one in self._known.values() if not one.is_over) >= MAX_RUNNING:
            log.warning("%d warm-ups are under way; none is ordered on %s for %s", MAX_RUNNING, warmup.node, warmup.job)
            return False
        over = [name for name, one in self._known.items() if one.is_over]
        for old in over[: max(0, len(self._known) - MAX_KNOWN + 1)]:
            del self._known[old]
        self._known[warmup.id] = warmup
        self._start_task(self._send_warmup(warmup))
        return True

    def stop_warmups(self, job: str) -> None:
        """Stop the warm-ups that serve only a job that has ended."""
        for one in self:
            if one.job == job and one.purpose in ("preload", "move") and not one.is_over:
                one.state = "stopped"
                self._start_task(self._send_logged(one.node, NodeCommand(kind=CommandKind.STOP, id=one.id)))

    def send_command(self, node: str, order: NodeCommand) -> bool:
        """Send another command to a node, and log its result. Returns False if too many commands are in progress, or
        commands are refused."""
        if not self.can_send:
            return False
        self._sending += 1
        self._start_task(self._send_logged(node, order)).add_done_callback(self._count_sent)
        return True

    def _count_sent(self, _task: asyncio.Task[None]) -> None:
        self._sending -= 1

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send_warmup(self, warmup: NodeWarmup) -> None:
        bits = b"" if warmup.shards is None else np.packbits(warmup.shards, bitorder="little").tobytes()
        order = NodeCommand(kind=CommandKind.WARM, id=warmup.id, dataset=warmup.dataset, shards=bits, job=warmup.job)
        done = await self._send(warmup.node, order)
        if isinstance(done, str):
            warmup.state, warmup.message = "failed", done
            self._note_end(warmup)
            return
        warmup.total, warmup.reported_at = done.blocks, time.monotonic()
        if warmup.is_over:  # stopped while the node was told; the node may have received STOP first
            await self._send_logged(warmup.node, NodeCommand(kind=CommandKind.STOP, id=warmup.id))
        if warmup.state == "ordered":
            warmup.state = "running"
            log.info(
                "%s of %s on %s for %s: %d blocks", warmup.purpose, warmup.dataset, warmup.node, warmup.job, done.blocks
            )

    async def _send_logged(self, node: str, order: NodeCommand) -> None:
        await self._send(node, order)

    async def _send(self, node: str, order: NodeCommand) -> NodeCommandResult | str:
        """Return the result of a command, or the reason for its failure."""
        why, backoff = "there is no such node", Backoff(FIRST_PAUSE, math.inf)
        for _ in range(TRIES):
            state = self._view.nodes.get(node)
            if state is None:
                break
            if self.reason_to_send_nothing():  # another replica leads since, and may send other commands
                why = self.reason_to_send_nothing()
                break
            try:
                return await self._client.send_command(state.host, state.control_port, order)
            except NodeRequestFailed as error:
                why = str(error)
                if error.status in (403, 409):  # a retry would give the same response
                    break
            await asyncio.sleep(backoff.note_failure(0.0))
        log.warning("node %s did not receive the command %s %s: %s", node, order.kind, order.dataset, why)
        return why

    def _record_progress(self, node: str) -> None:
        """Record the progress of warm-ups that a node has reported."""
        state = self._view.nodes.get(node)
        reported: list[CommandedWarmup] = state.report.warmups if state is not None and state.report is not None else []
        for progress in reported:
            one = self._known.get(progress.id)
            if one is None or one.is_over or one.state == "ordered":
                continue
            one.blocks, one.total, one.message = progress.blocks, progress.total, progress.message
            one.reported_at = time.monotonic()
            if progress.state in _END_STATES:
                one.state = progress.state
                self._note_end(one)

    def drop_lost(self, now: float) -> None:
        """Fail the warm-ups that their nodes will not report again. Call periodically; now: monotonic seconds."""
        for one in self:
            if one.state != "running":
                continue
            state = self._view.nodes.get(one.node)
            reported_at = state.reported_at if state is not None else None
            if reported_at is None:
                one.message = "the node is gone"
            elif reported_at - one.reported_at > UNREPORTED_SECONDS:
                one.message = "the node no longer reports the warmup: its daemon was restarted"
            elif now - reported_at > SILENT_SECONDS:
                one.message = "the node is silent"
            else:
                continue
            one.state = "failed"
            log.warning("%s of %s on %s for %s: %s", one.purpose, one.dataset, one.node, one.job, one.message)
            self._note_end(one)


def warmup_id(*parts: object) -> str:
    """Return the id of a warm-up: equal parts give equal ids, so a command that is sent twice is executed once."""
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=12).hexdigest()


def divide_shards(missing: npt.NDArray[np.bool_], nodes: int) -> list[npt.NDArray[np.bool_]]:
    """Divide the missing shards among *nodes* nodes, neighbouring shards together. Returns masks of shape (SHARDS,)."""
    numbers = np.flatnonzero(missing)
    found = []
    for part in np.array_split(numbers, nodes):
        mask = np.zeros(SHARDS, np.bool_)
        mask[part] = True
        found.append(mask)
    return found
