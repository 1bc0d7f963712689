"""How peers are reached: connections and probes, made in threads of their own, and what waits for them."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from cachefs_daemon.cluster.handshake import Greeting
from cachefs_daemon.cluster.membership import Membership
from cachefs_daemon.cluster.view import NodeRecord
from cachefs_daemon.peers.connecting import connect, probe
from cachefs_daemon.peers.connection import PeerConnection
from cachefs_daemon.peers.protocol import Sender
from cachefs_daemon.peers.tls import Certificates

# Threads that connect and probe. A dead peer takes one for 2 s at a time.
_CONNECTING: Final = 8


class Reaching:
    """Used on the event loop."""

    def __init__(self, cluster: str, membership: Membership, certificates: Certificates | None) -> None:
        """cluster: its name. certificates: None for none."""
        self.membership = membership
        self._cluster = cluster
        self._certificates = certificates
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(_CONNECTING, thread_name_prefix="peers-connect")
        self._tasks: set[asyncio.Task[None]] = set()

    def greeting(self, record: NodeRecord) -> Greeting:
        """What a question to that node says of itself."""
        view = self.membership.view
        return Greeting(self._cluster, view.me, record.id, record.incarnation, view.epoch)

    async def connect(self, record: NodeRecord) -> PeerConnection:
        """Raises CannotConnect."""
        link, tls = await self._loop.run_in_executor(self._threads, connect, record, self._certificates)
        return PeerConnection(link, tls, record.id)

    async def probe(self, record: NodeRecord) -> tuple[Sender, bool]:
        """Who answers there, and whether the daemon behind that server lives. Raises CannotConnect where nobody
        answers, or somebody else."""
        work = partial(probe, record, self._certificates, self.greeting(record))
        return await self._loop.run_in_executor(self._threads, work)

    def run(self, work: Coroutine[None, None, None]) -> None:
        """Until it ends, or `stop`."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """What runs ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """Threads end as soon as they can."""
        self._threads.shutdown(wait=False, cancel_futures=True)
