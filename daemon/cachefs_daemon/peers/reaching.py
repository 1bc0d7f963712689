"""How peers are reached: connections and probes, made in threads of their own, and what waits for them."""

import asyncio
import dataclasses
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from cachefs_daemon.cluster.handshake import Greeting
from cachefs_daemon.cluster.membership import Membership
from cachefs_daemon.cluster.secret import ClusterSecret, make_nonce
from cachefs_daemon.cluster.view import NodeRecord
from cachefs_daemon.peers.connecting import connect, probe
from cachefs_daemon.peers.connection import PeerConnection
from cachefs_daemon.peers.protocol import Sender, SenderCheck
from cachefs_daemon.peers.tls import Certificates

# Threads that connect and probe. A dead peer takes one for 2 s at a time.
_CONNECTING: Final = 8


class Reaching:
    """Used on the event loop."""

    def __init__(
        self, cluster: str, membership: Membership, certificates: Certificates | None, secret: ClusterSecret | None
    ) -> None:
        """cluster: its name. certificates, secret: None for none."""
        self._secret = secret
        self.membership = membership
        self._cluster = cluster
        self._certificates = certificates
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(_CONNECTING, thread_name_prefix="peers-connect")
        self._tasks: set[asyncio.Task[None]] = set()

    def greeting(self, record: NodeRecord) -> Greeting:
        """What a question to that node says of itself."""
        view = self.membership.view
        greeting = Greeting(self._cluster, view.me, record.id, self._incarnation(record), view.epoch)
        if self._secret is None:
            return greeting
        greeting = dataclasses.replace(greeting, nonce=make_nonce())
        proof = self._secret.request_proof(greeting.scope(record.id, record.data_port))
        return dataclasses.replace(greeting, proof=proof)

    def _incarnation(self, record: NodeRecord) -> str:
        """Return which start of the node is meant; "" while none is known."""
        known = self.membership.view.get(record.id)
        return record.incarnation or (known.incarnation if known is not None else "")

    def checks(self, record: NodeRecord, greeting: Greeting) -> SenderCheck:
        """Return the check of who answers the *greeting* to that node."""
        return SenderCheck(greeting, record.data_port, self._secret)

    async def connect(self, record: NodeRecord) -> PeerConnection:
        """Raises CannotConnect."""
        if self._secret is not None and not self._incarnation(record):  # which a proof has to name
            sender, _ = await self.probe(record)
            self.membership.heard(sender.node, sender.incarnation)
        link, tls = await self._loop.run_in_executor(self._threads, connect, record, self._certificates)
        return PeerConnection(link, tls, record.id)

    async def probe(self, record: NodeRecord) -> tuple[Sender, bool]:
        """Who answers there, and whether the daemon behind that server lives. Raises CannotConnect where nobody
        answers, or somebody else."""
        greeting = self.greeting(record)
        work = partial(probe, record, self._certificates, greeting, self.checks(record, greeting))
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
