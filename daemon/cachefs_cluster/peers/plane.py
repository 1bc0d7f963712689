"""The data plane of a node in a cluster: its client and its servers."""

import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from cachefs.cluster_messages import PeerTraffic, RailTraffic
from cachefs_cluster.membership.membership import Membership
from cachefs_cluster.membership.secret import ClusterSecret
from cachefs_cluster.peers.client import PeerClient
from cachefs_cluster.peers.server_messages import ServedTotals
from cachefs_cluster.peers.server_process import PeerServers, ServedListener, ServerSettings
from cachefs_cluster.peers.tls import Certificates, own_certificate_problem, tls_files
from cachefs_cluster.section import ClusterSection
from cachefs_daemon.runtime.error_log import ErrorLog

log = logging.getLogger(__name__)

# Serves one connection of the fetch channel for a peer server.
AdoptConnection = Callable[[socket.socket], Awaitable[None]]


class DataPlane:
    """Starts, stops and reports on the client and the servers. Used on the event loop."""

    def __init__(
        self, section: ClusterSection, membership: Membership, errors: ErrorLog, secret: ClusterSecret | None
    ) -> None:
        """Raises ConfigError."""
        self._secret = secret
        self._section = section
        self._membership = membership
        self._errors = errors
        self._files = tls_files(section)
        self.certificates = Certificates(self._files) if self._files is not None else None
        if why := own_certificate_problem(section):
            log.warning("%s", why)
        self.client = PeerClient(section.cluster, membership, errors, self.certificates, section.window, secret)
        self.servers: PeerServers | None = None  # until `open_servers`
        self._served_listeners: list[ServedListener] = []

    def open_servers(self, index: Path, tiers: dict[str, Path], adopt: AdoptConnection) -> None:
        """Bind the port. index, tiers: what servers read: the index, and tier directories by name. Raises
        ConfigError."""
        settings = ServerSettings(self._section.listen_addresses, index, tiers, self._files, secret=self._secret)
        self.servers = PeerServers(
            self._section.cluster, self._membership, settings, adopt, self._errors, self._note_served_blocks
        )

    def add_served_listener(self, listener: ServedListener) -> None:
        """Call *listener* with a node's id and the keys of the blocks that it received from this node."""
        self._served_listeners.append(listener)

    def _note_served_blocks(self, node: str, keys: Sequence[bytes]) -> None:
        for listener in self._served_listeners:
            listener(node, keys)

    async def start(self) -> None:
        if self.servers is not None:
            await self.servers.start()

    async def stop(self) -> None:
        """Stop the servers and the client. May be called again."""
        if self.servers is not None:
            await self.servers.stop()
        await self.client.close()

    def traffic(self, node_id: str) -> PeerTraffic:
        """Return the blocks and bytes that this node and *node_id* exchanged."""
        got = self.client.counters.get(node_id)
        gave = self.servers.served_totals().get(node_id) if self.servers is not None else None
        gave = gave or ServedTotals(node_id)
        return PeerTraffic(
            blocks_in=got.blocks if got is not None else 0,
            bytes_in=got.bytes if got is not None else 0,
            blocks_out=gave.blocks,
            bytes_out=gave.bytes,
            failures=got.failures if got is not None else 0,
            busy=got.busy if got is not None else 0,
            wrong=got.wrong if got is not None else 0,
            seconds=self.client.median_seconds(node_id),
            cooling=not self.client.is_usable(node_id),
            rails=self._rail_traffic(node_id),
        )

    def _rail_traffic(self, node_id: str) -> list[RailTraffic]:
        """Return the traffic by rail of a node that has several."""
        rails = self.client.rails_of(node_id)
        return [
            RailTraffic(
                address=rail.record.address,
                card=rail.card,
                bytes_in=rail.received_bytes,
                problem=rail.health.reason if rail.health.is_out_of_use else "",
            )
            for rail in (rails if len(rails) > 1 else ())
        ]
