"""Backoff for rails that fail: they get no requests until a probe, which delays no reader, succeeds.

What was requested over a failed rail goes over the other rails of the peer. A peer is out of use once all its rails
are.
"""

import asyncio
import logging
import random
from typing import Final

from cachefs_cluster.peers.connecting import CannotConnect
from cachefs_cluster.peers.peer import LANES, Peer
from cachefs_cluster.peers.peer_connector import PeerConnector
from cachefs_cluster.peers.peer_requests import FailureKind, PeerRequestFailed
from cachefs_cluster.peers.rail import Rail
from cachefs_daemon.runtime.error_log import ErrorLog

log = logging.getLogger(__name__)

# Seconds without a byte after which a rail is avoided while it is probed.
_SUSPECT_SECONDS: Final = 0.25
# Seconds that a probe of a rail may take longer than that of another rail of the peer.
_LATER_SECONDS: Final = 0.5


class CircuitBreaker:
    """Takes failing rails out of use, and probes them. Used on the event loop."""

    def __init__(self, reaching: PeerConnector, errors: ErrorLog) -> None:
        self._connector = reaching
        self._errors = errors
        self._loop = asyncio.get_running_loop()

    def fail_connection(self, peer: Peer, rail: Rail, error: CannotConnect) -> None:
        """Take a rail out of use to which no connection can be made. Fail all queued requests if it was the last."""
        reason = str(error)
        if error.is_wrong_node:
            self._errors.add(f"node {peer.record.name}", reason)
        self.take_out_of_use(peer, rail, reason)
        if not peer.is_out_of_use:
            return
        why = FailureKind.WRONG_NODE if error.is_wrong_node else FailureKind.UNREACHABLE
        for pending in [*peer.queued_blocks()]:
            if pending.is_open:
                peer.counters.failures += 1
            pending.finish(PeerRequestFailed(reason, why))
        for lane in peer.queues:
            for queue in lane:
                queue.clear()

    def take_out_of_use(self, peer: Peer, rail: Rail, reason: str) -> None:
        """Send no requests over the rail until a probe succeeds."""
        if not rail.health.note_failure(reason, self._loop.time(), random.random()):
            return
        instead = "other sources" if peer.is_out_of_use else "its other addresses"
        self._errors.add(f"node {peer.record.name}", f"{reason}; {instead} are used until it answers")
        rail.close_idle()
        if peer.is_out_of_use:
            self._connector.membership.note_silence(peer.record.id)
            for pending in [*peer.queued_blocks()]:
                self._loop.call_soon(pending.finish, PeerRequestFailed(reason, FailureKind.UNREACHABLE))
            for lane in peer.queues:
                for queue in lane:
                    queue.clear()
        else:
            for batch in peer.batches.values():
                if batch.rail is rail and not batch.abort_reason:
                    batch.abort(reason)  # its blocks are then requested over the others
        self._connector.start_task(self._probe_until_alive(peer, rail))

    def probe_silent(self, peer: Peer) -> None:
        """Probe a silent peer, and take those of its rails out of use whose probes fail."""
        if not (peer.is_being_probed or peer.is_out_of_use):
            peer.is_being_probed = True
            self._connector.start_task(self._probe_once(peer))

    async def _probe_once(self, peer: Peer) -> None:
        """Probe all rails of the peer once, and avoid those that are silent meanwhile."""
        began, rails = self._loop.time(), [rail for rail in peer.rails if not rail.health.is_out_of_use]
        silent = {batch.rail for batch in peer.batches.values() if began - batch.last_byte_at > _SUSPECT_SECONDS}
        for rail in rails:
            rail.is_suspect = rail in silent
        probes = {self._loop.create_task(self._connector.probe(rail.record)): rail for rail in rails}
        unfinished, seconds = set(probes), None
        try:
            while unfinished:
                done, unfinished = await asyncio.wait(unfinished, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    rail = probes[task]
                    try:
                        sender, lives = task.result()
                    except CannotConnect as error:
                        self._note_failed_probe(peer, rail, began, str(error))
                        continue
                    seconds, rail.is_suspect = _LATER_SECONDS, False
                    peer.note_heartbeat(self._loop.time(), fetch=lives)
                    self._connector.membership.note_response(sender.node, sender.incarnation)
                if not done:
                    break
            for task in unfinished:
                text = f"node {peer.record.name} at {probes[task].record.address} does not answer"
                self._note_failed_probe(peer, probes[task], began, text)
        finally:
            for task in unfinished:
                task.cancel()
            for rail in rails:
                rail.is_suspect = False
            peer.is_being_probed = False

    def _note_failed_probe(self, peer: Peer, rail: Rail, began: float, reason: str) -> None:
        """Take a rail out of use, unless the peer sent anything over it since the probe began."""
        is_alive = any(batch.last_byte_at > began for batch in peer.batches.values() if batch.rail is rail)
        if len(peer.rails) == 1:
            is_alive = is_alive or max(map(peer.last_heartbeat, LANES)) > began
        if not is_alive:
            self.take_out_of_use(peer, rail, reason)

    async def _probe_until_alive(self, peer: Peer, rail: Rail) -> None:
        """Probe the rail, with growing pauses, until it answers or the node does not have it any more."""
        health = rail.health
        while health.is_out_of_use:
            await asyncio.sleep(max(0.0, health.probe_at - self._loop.time()))
            if self._connector.membership.view.get(peer.record.id) is None or rail not in peer.rails:
                health.is_out_of_use = False  # it has left: later requests to it start anew
            if not health.is_out_of_use:
                return
            try:
                sender, lives = await self._connector.probe(rail.record)
            except CannotConnect as error:
                health.reason = str(error)
                health.note_probe(alive=False, now=self._loop.time(), chance=random.random())
                if peer.is_out_of_use:
                    self._connector.membership.note_silence(peer.record.id)
            else:
                peer.note_heartbeat(self._loop.time(), fetch=lives)  # readers that found it silent ask it again
                health.note_probe(alive=True, now=self._loop.time(), chance=random.random())
                log.info("node %s answers again at %s and is used again", peer.record.name, rail.record.address)
                self._connector.membership.note_response(sender.node, sender.incarnation)
