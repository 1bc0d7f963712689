"""Warm-ups that this service orders on nodes: before jobs start, for additional copies, and when jobs move."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachefs.observe_messages import Order, OrderDone, OrderedWarmup, OrderKind
from cachefs.planning.blocks.shard_bytes import SHARDS
from cachefs_scheduler.view.asking import Asking, NodeFailed
from cachefs_scheduler.view.cluster_view import ClusterView

log = logging.getLogger(__name__)

# Warm-ups in progress at once, and warm-ups remembered in all.
MOST_RUNNING: Final = 1024
MOST_KNOWN: Final = 2048
# Other commands in progress at once.
MOST_TOLD: Final = 64
# Attempts to send a command to a node, and the pause before the second attempt in seconds; pauses double.
TRIES: Final = 5
FIRST_PAUSE: Final = 0.5
# Seconds after which a warm-up counts as lost: UNTOLD if its node reports without naming it, as after a restart of the
# daemon; SILENT if its node is silent. A lost warm-up must not count forever, neither as in progress nor as a copy.
UNTOLD: Final = 60.0
SILENT: Final = 600.0
_ENDED: Final = ("done", "failed", "stopped", "cancelled")


@dataclass(slots=True)
class Warming:
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
    told: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.state in _ENDED


class Warmings:
    """Starts, follows and stops warm-ups. Used on the event loop."""

    def __init__(self, view: ClusterView, asking: Asking, refusal: Callable[[], str]) -> None:
        """refusal: returns why this service must not send commands now, or "" if it may."""
        self._view = view
        self._asking = asking
        self.refusal = refusal
        self._known: dict[str, Warming] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._telling = 0
        # Called whenever a warm-up has ended.
        self.ended: Callable[[Warming], None] = lambda one: None
        view.listeners.append(self._follow)

    @property
    def may_tell(self) -> bool:
        """Return whether `tell` would send a command now."""
        return not self.refusal() and self._telling < MOST_TOLD

    def __iter__(self) -> Iterator[Warming]:
        return iter(list(self._known.values()))

    def begin(self, wanted: Warming) -> bool:
        """Start a warm-up unless one with its id is known. Returns whether it is in progress."""
        if self.refusal():
            return False
        known = self._known.get(wanted.id)
        if known is not None:
            return not known.is_over
        if sum(1 for one in self._known.values() if not one.is_over) >= MOST_RUNNING:
            log.warning(
                "%d warm-ups are under way; none is ordered on %s for %s", MOST_RUNNING, wanted.node, wanted.job
            )
            return False
        over = [name for name, one in self._known.items() if one.is_over]
        for old in over[: max(0, len(self._known) - MOST_KNOWN + 1)]:
            del self._known[old]
        self._known[wanted.id] = wanted
        self._start(self._order(wanted))
        return True

    def stop(self, job: str) -> None:
        """Stop the warm-ups that serve only a job that has ended."""
        for one in self:
            if one.job == job and one.purpose in ("preload", "move") and not one.is_over:
                one.state = "stopped"
                self._start(self._tell(one.node, Order(kind=OrderKind.STOP, id=one.id)))

    def tell(self, node: str, order: Order) -> bool:
        """Send another command to a node, and log its result. Returns False if too many commands are in progress, or
        commands are refused."""
        if not self.may_tell:
            return False
        self._telling += 1
        self._start(self._tell(node, order)).add_done_callback(self._told)
        return True

    def _told(self, _task: asyncio.Task[None]) -> None:
        self._telling -= 1

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _order(self, wanted: Warming) -> None:
        bits = b"" if wanted.shards is None else np.packbits(wanted.shards, bitorder="little").tobytes()
        order = Order(kind=OrderKind.WARM, id=wanted.id, dataset=wanted.dataset, shards=bits, job=wanted.job)
        done = await self._send(wanted.node, order)
        if isinstance(done, str):
            wanted.state, wanted.message = "failed", done
            self.ended(wanted)
            return
        wanted.total, wanted.told = done.blocks, time.monotonic()
        if wanted.is_over:  # stopped while the node was told; the node may have received STOP first
            await self._tell(wanted.node, Order(kind=OrderKind.STOP, id=wanted.id))
        if wanted.state == "ordered":
            wanted.state = "running"
            log.info(
                "%s of %s on %s for %s: %d blocks", wanted.purpose, wanted.dataset, wanted.node, wanted.job, done.blocks
            )

    async def _tell(self, node: str, order: Order) -> None:
        await self._send(node, order)

    async def _send(self, node: str, order: Order) -> OrderDone | str:
        """Return the result of a command, or the reason for its failure."""
        why, pause = "there is no such node", FIRST_PAUSE
        for _ in range(TRIES):
            state = self._view.nodes.get(node)
            if state is None:
                break
            if self.refusal():  # another replica leads since, and may send other commands
                why = self.refusal()
                break
            try:
                return await self._asking.order(state.host, state.control_port, order)
            except NodeFailed as error:
                why = str(error)
                if error.status in (403, 409):  # a retry would give the same response
                    break
            await asyncio.sleep(pause)
            pause *= 2
        log.warning("node %s was not told: %s %s: %s", node, order.kind, order.dataset, why)
        return why

    def _follow(self, node: str) -> None:
        """Record the progress of warm-ups that a node has reported."""
        state = self._view.nodes.get(node)
        told: list[OrderedWarmup] = state.report.warmups if state is not None and state.report is not None else []
        for said in told:
            one = self._known.get(said.id)
            if one is None or one.is_over or one.state == "ordered":
                continue
            one.blocks, one.total, one.message = said.blocks, said.total, said.message
            one.told = time.monotonic()
            if said.state in _ENDED:
                one.state = said.state
                self.ended(one)

    def drop_lost(self, now: float) -> None:
        """Fail the warm-ups that their nodes will not report again. Call periodically; now: monotonic seconds."""
        for one in self:
            if one.state != "running":
                continue
            state = self._view.nodes.get(one.node)
            heard = state.heard if state is not None else None
            if heard is None:
                one.message = "the node is gone"
            elif heard - one.told > UNTOLD:
                one.message = "the node knows it no more: its daemon was started again"
            elif now - heard > SILENT:
                one.message = "the node is silent"
            else:
                continue
            one.state = "failed"
            log.warning("%s of %s on %s for %s: %s", one.purpose, one.dataset, one.node, one.job, one.message)
            self.ended(one)


def warming_id(*parts: object) -> str:
    """Return the id of a warm-up: equal parts give equal ids, so a command that is sent twice is executed once."""
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=12).hexdigest()


def divided(lacking: npt.NDArray[np.bool_], nodes: int) -> list[npt.NDArray[np.bool_]]:
    """Divide the missing shards among *nodes* nodes, neighbouring shards together. Returns masks of shape (SHARDS,)."""
    numbers = np.flatnonzero(lacking)
    found = []
    for part in np.array_split(numbers, nodes):
        mask = np.zeros(SHARDS, np.bool_)
        mask[part] = True
        found.append(mask)
    return found
