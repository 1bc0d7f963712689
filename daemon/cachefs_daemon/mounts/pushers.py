"""All pushers of the node's mounts, and what is in the page cache of each mount for as long as it lives."""

import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Callable, Container, Mapping, Sequence

import msgspec
import numpy as np

from cachefs.messages import MountView
from cachefs.planning.blocks.presence import Presence
from cachefs.planning.blocks.space import NO_BLOCK, Ids
from cachefs.planning.pagecache.coverage import Coverage
from cachefs.planning.pagecache.lookahead import all_tripwires
from cachefs.planning.pagecache.states import HELD, NOTHING, Blocks, States
from cachefs.planning.sequences.plan import Plan
from cachefs.push_messages import PushDone, PushOrder, PushSubscribe
from cachefs.sizes import format_size
from cachefs_daemon.mounts.mount_affinity import MountAffinity
from cachefs_daemon.mounts.push_stream import PushStream, Readers

log = logging.getLogger(__name__)


class Pushers:
    """Used from the event loop only. shows: does a mount (by the id in its reports) show a snapshot?"""

    def __init__(
        self,
        plan: Plan,
        presence: Presence,
        coverage: Coverage,
        readers: Readers,
        shows: Callable[[str, str], bool],
    ) -> None:
        self._plan = plan
        self._presence = presence
        self._coverage = coverage
        self._readers = readers
        self._shows = shows
        self._pushers: dict[str, PushStream] = {}
        self._affinity = MountAffinity()

    def is_active(self) -> bool:
        """Somebody pushes, and may."""
        return any(pusher.listening and pusher.pages.budget > 0 for pusher in self._pushers.values())

    async def orders(self, request: PushSubscribe) -> AsyncGenerator[PushOrder, None]:
        pusher = self._pushers.get(request.mount)
        if pusher is None:
            shows = functools.partial(self._shows, request.mount)
            pusher = self._pushers[request.mount] = PushStream(
                self._plan, self._presence, self._readers, shows, self._affinity.mounts_of
            )
            self.show_cached()
        log.info("mount %s takes pages ahead of reads, up to %s", request.mount, format_size(request.budget))
        async with contextlib.aclosing(pusher.orders(request)) as orders:
            async for order in orders:
                yield order

    def forget_gone(self, lives: Callable[[str], bool], consumers: Container[str]) -> None:
        """lives: is there a mount with that id? consumers: keys of those there are."""
        self._affinity.forget_others(consumers)
        gone = [mount for mount, pusher in self._pushers.items() if not pusher.listening and not lives(mount)]
        for mount in gone:
            del self._pushers[mount]

    def report(self, report: PushDone) -> None:
        pusher = self._pushers.get(report.mount)
        if pusher is not None:
            pusher.report(report)

    def wake(self) -> None:
        for pusher in self._pushers.values():
            pusher.wake()

    def show_cached(self) -> None:
        """Let the memory tier know what it need not keep. To be called every few seconds, as tripwires change."""
        mounts = list(self._pushers.values())
        self._coverage.show(mounts, all_tripwires(self._plan, self._readers(0.0)) if mounts else {})

    def pages_of(self, mount: str) -> States:
        """What is in the page cache of *mount*, as far as its pusher knows."""
        pusher = self._pushers.get(mount)
        return pusher.pages.states if pusher is not None else NOTHING

    def note_own_reads(self, mount: str, own_reads: Mapping[str, int]) -> None:
        """own_reads: by key of the consumer, how many of its own reads came through *mount*."""
        self._affinity.note(mount, own_reads)

    def on_reads(self, mount: str, accessed: Sequence[bytes], tripped: Mapping[str, Ids]) -> None:
        """*mount* has read these blocks. tripped: by snapshot, those that were left out of its page cache on
        purpose."""
        pusher = self._pushers.get(mount)
        if pusher is None:
            return
        for snapshot, space in pusher.pages.spaces.items():
            ids = space.ids(accessed)
            ids = ids[ids != NO_BLOCK]
            if len(ids):
                pusher.pages.read(Blocks(snapshot, ids), tripped.get(snapshot, ids[:0]))
        pusher.wake()

    def ahead(self, snapshot: str, blocks: Ids) -> int:
        """Bytes of these blocks that are in some mount's page cache."""
        most = 0
        for pusher in self._pushers.values():
            states = pusher.pages.states.get(snapshot)
            if states is not None:
                held = np.unique(blocks[states[blocks] == HELD])
                most = max(most, int(pusher.pages.spaces[snapshot].sizes[held].sum(dtype=np.int64)))
        return most

    def shown(self, view: MountView) -> MountView:
        """With what is pushed."""
        pusher = self._pushers.get(view.id)
        if pusher is None:
            return view
        pages = pusher.pages
        counters = {f"push_{name}": value for name, value in pusher.counters.items()}
        counters |= {
            "push_late": pages.late,
            "push_wasted": pages.wasted,
            "push_held_bytes": pages.used,
            "push_budget": pages.budget,
        }
        return msgspec.structs.replace(view, counters={**view.counters, **counters})
