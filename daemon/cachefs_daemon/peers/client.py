"""Blocks from other nodes: one window for all of them, batches, connections that stay, and who of them is well."""

from collections.abc import Callable
from dataclasses import dataclass

from cachefs_daemon.cluster.membership import Membership
from cachefs_daemon.cluster.view import NodeRecord
from cachefs_daemon.peers.answers import How, PeerAnswer, PeerCounters, Wanted
from cachefs_daemon.peers.tls import Certificates
from cachefs_daemon.runtime.errorlog import ErrorLog


@dataclass(slots=True, eq=False)
class Ask:
    """A block that a peer is asked for."""

    wanted: Wanted
    answer: Callable[[PeerAnswer], None]

    def cancel(self) -> None:
        """Nobody waits for it any more; `answer` is not called from now on. May be called again, and too late."""
        self.answer = _ignore


class PeerClient:
    """Used on the event loop; receives in threads of its own."""

    def __init__(
        self, cluster: str, membership: Membership, errors: ErrorLog, certificates: Certificates | None, window: int = 0
    ) -> None:
        """cluster: its name. certificates: None for none. window: bytes that may be on the way from all peers together;
        0 to learn it."""
        self.counters: dict[str, PeerCounters] = {}  # by id of the peer: of those that were asked

    def ask(self, node: NodeRecord, wanted: Wanted, how: How, answer: Callable[[PeerAnswer], None]) -> Ask:
        """Ask a peer for a block. *answer* is called once, in a later turn of the loop, and at `how.until` at the
        latest."""
        raise NotImplementedError

    def usable(self, node_id: str) -> bool:
        """Is it asked at all? False while it does not answer, until a probe has got through to it."""
        raise NotImplementedError

    def expected_seconds(self, node: NodeRecord, length: int) -> float:
        """From the question until the last byte of a block that it has, if it were asked now."""
        raise NotImplementedError

    @property
    def window(self) -> int:
        """Bytes that may be on the way from all peers together, for blocks that they have."""
        raise NotImplementedError

    async def close(self) -> None:
        """What is asked is answered as failed."""
        raise NotImplementedError


def _ignore(_: PeerAnswer) -> None:
    pass
