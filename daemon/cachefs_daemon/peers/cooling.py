"""Backoff for peers that fail: they get no requests until a probe, which delays no reader, succeeds."""

import asyncio
import logging
import random

from cachefs_daemon.peers.answers import Failed, Why
from cachefs_daemon.peers.connecting import CannotConnect
from cachefs_daemon.peers.peer import LANES, Peer
from cachefs_daemon.peers.reaching import Reaching
from cachefs_daemon.runtime.errorlog import ErrorLog

log = logging.getLogger(__name__)


class Cooling:
    """Takes failing peers out of use, and probes them. Used on the event loop."""

    def __init__(self, reaching: Reaching, errors: ErrorLog) -> None:
        self._reaching = reaching
        self._errors = errors
        self._loop = asyncio.get_running_loop()

    def fail(self, peer: Peer, reason: str, why: Why) -> None:
        """Fail all queued requests of a peer to which no connection can be made."""
        if why == Why.STRANGER:
            self._errors.add(f"node {peer.record.name}", reason)
        self.cool(peer, reason)
        for ask in [*peer.waiting_asks()]:
            if ask.is_open:
                peer.counters.failures += 1
            ask.end(Failed(reason, why))
        for lane in peer.waiting:
            for queue in lane:
                queue.clear()

    def cool(self, peer: Peer, reason: str) -> None:
        """Send the peer no requests until a probe succeeds."""
        if not peer.liveness.failed(reason, self._loop.time(), random.random()):
            return
        self._errors.add(f"node {peer.record.name}", f"{reason}; other sources are used until it answers")
        self._reaching.membership.lost(peer.record.id)
        for connection in peer.idle:
            connection.abort()
        peer.idle.clear()
        for ask in [*peer.waiting_asks()]:
            self._loop.call_soon(ask.end, Failed(reason, Why.AWAY))
        for lane in peer.waiting:
            for queue in lane:
                queue.clear()
        self._reaching.run(self._probe(peer))

    def doubt(self, peer: Peer) -> None:
        """Probe a silent peer, and take it out of use if the probe fails."""
        if not (peer.is_doubted or peer.liveness.cooling):
            peer.is_doubted = True
            self._reaching.run(self._settle_doubt(peer))

    async def _settle_doubt(self, peer: Peer) -> None:
        """Probe the peer once."""
        began = self._loop.time()
        try:
            _, lives = await self._reaching.probe(peer.record)
            peer.sign_given(self._loop.time(), fetch=lives)
        except CannotConnect as error:
            if max(map(peer.sign, LANES)) <= began:
                self.cool(peer, str(error))
        finally:
            peer.is_doubted = False

    async def _probe(self, peer: Peer) -> None:
        """Probe the peer, with growing pauses, until it answers or leaves."""
        liveness = peer.liveness
        while liveness.cooling:
            await asyncio.sleep(max(0.0, liveness.probe_at - self._loop.time()))
            record = peer.record
            if self._reaching.membership.view.get(record.id) is None:
                liveness.cooling = False  # it has left: later requests to it start anew
            if not liveness.cooling:
                return
            try:
                sender, lives = await self._reaching.probe(record)
            except CannotConnect as error:
                liveness.reason = str(error)
                liveness.probed(alive=False, now=self._loop.time(), chance=random.random())
                self._reaching.membership.lost(record.id)
            else:
                peer.sign_given(self._loop.time(), fetch=lives)  # readers that found it silent ask it again
                liveness.probed(alive=True, now=self._loop.time(), chance=random.random())
                log.info("node %s answers again, and is asked for blocks", record.name)
                self._reaching.membership.heard(sender.node, sender.incarnation)
