"""Opens connections and probes to peers, and runs the tasks that wait for them."""

import asyncio
import dataclasses
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from cachefs_cluster.membership.handshake import Greeting
from cachefs_cluster.membership.membership import Membership
from cachefs_cluster.membership.secret import ClusterSecret, make_nonce
from cachefs_cluster.membership.view import NodeRecord
from cachefs_cluster.peers.connecting import CannotConnect, connect, probe, start_tls
from cachefs_cluster.peers.connection import PeerConnection
from cachefs_cluster.peers.network_cards import NetworkCards
from cachefs_cluster.peers.protocol import RespondingNode, SenderCheck
from cachefs_cluster.peers.tls import Certificates

# Threads for names, handshakes and probes. A peer that accepts connections and does not answer occupies one for 4 s.
_THREADS: Final = 8


class PeerConnector:
    """Connects to peers and probes them as this node. Used on the event loop."""

    def __init__(
        self, cluster: str, membership: Membership, certificates: Certificates | None, secret: ClusterSecret | None
    ) -> None:
        """cluster: name of the cluster. certificates, secret: None without TLS, or without a secret."""
        self._secret = secret
        self.membership = membership
        self._cluster = cluster
        self._certificates = certificates
        self._cards = NetworkCards()
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="peers-connect")
        self._tasks: set[asyncio.Task[None]] = set()

    def hosts_of(self, record: NodeRecord) -> tuple[str, ...]:
        """Return the hosts of a node that may be connected to. With a secret, all nodes are on loopback: a further
        address there is no other card, and another user may listen on it, to whom a proof must not go."""
        return record.hosts if self._secret is None else (record.host,)

    def make_greeting(self, record: NodeRecord) -> Greeting:
        """Return the greeting for a request to that node, with a proof if the cluster has a secret."""
        view = self.membership.view
        greeting = Greeting(self._cluster, view.me, record.id, self._incarnation(record), view.epoch)
        if self._secret is None:
            return greeting
        greeting = dataclasses.replace(greeting, nonce=make_nonce())
        proof = self._secret.request_proof(greeting.scope(record.id, record.data_port))
        return dataclasses.replace(greeting, proof=proof)

    def _incarnation(self, record: NodeRecord) -> str:
        """Return the incarnation of the node to address; "" while none is known."""
        known = self.membership.view.get(record.id)
        return record.incarnation or (known.incarnation if known is not None else "")

    def make_sender_check(self, record: NodeRecord, greeting: Greeting) -> SenderCheck:
        """Return the check of the node that responds to *greeting*."""
        return SenderCheck(greeting, record.data_port, self._secret)

    async def connect(self, record: NodeRecord) -> PeerConnection:
        """Open a connection to the node. Raises CannotConnect."""
        if self._secret is not None and not self._incarnation(record):  # the proof must name it
            sender, _ = await self.probe(record)
            self.membership.note_response(sender.node, sender.incarnation)
        link = await connect(record, self._threads)
        tls = None
        if self._certificates is not None:
            tls = await self._loop.run_in_executor(self._threads, start_tls, link, record, self._certificates)
        try:
            card = self._cards.find_card(link.getsockname()[0])
        except OSError as error:
            link.close()
            raise CannotConnect(f"node {record.name} at {record.address} cannot be reached: {error}") from None
        return PeerConnection(link, tls, record.id, card)

    async def probe(self, record: NodeRecord) -> tuple[RespondingNode, bool]:
        """Return which node answers there, and whether the daemon behind its server is alive. Raises CannotConnect if
        no node answers, or another one."""
        greeting = self.make_greeting(record)
        link = await connect(record, self._threads)
        work = partial(probe, link, record, self._certificates, greeting, self.make_sender_check(record, greeting))
        return await self._loop.run_in_executor(self._threads, work)

    def start_task(self, work: Coroutine[None, None, None]) -> None:
        """Run a task until it ends, or until `stop`."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """Let the threads end as soon as they can."""
        self._threads.shutdown(wait=False, cancel_futures=True)
