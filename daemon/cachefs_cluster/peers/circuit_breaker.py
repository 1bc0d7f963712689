"""Backoff for peers that fail: they get no requests until a probe, which delays no reader, succeeds."""

import asyncio
import logging
import random

from cachefs_cluster.peers.connecting import CannotConnect
from cachefs_cluster.peers.peer import LANES, Peer
from cachefs_cluster.peers.peer_connector import PeerConnector
from cachefs_cluster.peers.peer_requests import FailureKind, PeerRequestFailed
from cachefs_daemon.runtime.error_log import ErrorLog

log = logging.getLogger(__name__)


class CircuitBreaker:
    """Takes failing peers out of use, and probes them. Used on the event loop."""

    def __init__(self, reaching: PeerConnector, errors: ErrorLog) -> None:
        self._connector = reaching
        self._errors = errors
        self._loop = asyncio.get_running_loop()

    def fail_queued(self, peer: Peer, reason: str, why: FailureKind) -> None:
        """Fail all queued requests of a peer to which no connection can be made."""
        if why == FailureKind.WRONG_NODE:
            self._errors.add(f"node {peer.record.name}", reason)
        self.take_out_of_use(peer, reason)
        for pending in [*peer.queued_blocks()]:
            if pending.is_open:
                peer.counters.failures += 1
            pending.finish(PeerRequestFailed(reason, why))
        for lane in peer.queues:
            for queue in lane:
                queue.clear()

    def take_out_of_use(self, peer: Peer, reason: str) -> None:
        """Send the peer no requests until a probe succeeds."""
        if not peer.health.note_failure(reason, self._loop.time(), random.random()):
            return
        self._errors.add(f"node {peer.record.name}", f"{reason}; other sources are used until it answers")
        self._connector.membership.note_silence(peer.record.id)
        for connection in peer.idle_connections:
            connection.abort()
        peer.idle_connections.clear()
        for pending in [*peer.queued_blocks()]:
            self._loop.call_soon(pending.finish, PeerRequestFailed(reason, FailureKind.UNREACHABLE))
        for lane in peer.queues:
            for queue in lane:
                queue.clear()
        self._connector.start_task(self._probe_until_alive(peer))

    def probe_silent(self, peer: Peer) -> None:
        """Probe a silent peer, and take it out of use if the probe fails."""
        if not (peer.is_being_probed or peer.health.is_out_of_use):
            peer.is_being_probed = True
            self._connector.start_task(self._probe_once(peer))

    async def _probe_once(self, peer: Peer) -> None:
        """Probe the peer once."""
        began = self._loop.time()
        try:
            _, lives = await self._connector.probe(peer.record)
            peer.note_heartbeat(self._loop.time(), fetch=lives)
        except CannotConnect as error:
            if max(map(peer.last_heartbeat, LANES)) <= began:
                self.take_out_of_use(peer, str(error))
        finally:
            peer.is_being_probed = False

    async def _probe_until_alive(self, peer: Peer) -> None:
        """Probe the peer, with growing pauses, until it answers or leaves."""
        liveness = peer.health
        while liveness.is_out_of_use:
            await asyncio.sleep(max(0.0, liveness.probe_at - self._loop.time()))
            record = peer.record
            if self._connector.membership.view.get(record.id) is None:
                liveness.is_out_of_use = False  # it has left: later requests to it start anew
            if not liveness.is_out_of_use:
                return
            try:
                sender, lives = await self._connector.probe(record)
            except CannotConnect as error:
                liveness.reason = str(error)
                liveness.note_probe(alive=False, now=self._loop.time(), chance=random.random())
                self._connector.membership.note_silence(record.id)
            else:
                peer.note_heartbeat(self._loop.time(), fetch=lives)  # readers that found it silent ask it again
                liveness.note_probe(alive=True, now=self._loop.time(), chance=random.random())
                log.info("node %s answers again and is used again", record.name)
                self._connector.membership.note_response(sender.node, sender.incarnation)
