"""The state that all searches for blocks share: which peers are well, how long blocks take, and the hedge budget.

A peer is judged by its heartbeats (`PeerHeartbeatHealth`) and by its responses (`PeerResponseHealth`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from cachefs.backoff import Backoff
from cachefs.planning.requests.request_times import HedgeBudget, TimesBySize
from cachefs_cluster.membership.view import NodeRecord
from cachefs_cluster.peers.peer_requests import BlockRequest, PeerResponse, RequestOptions
from cachefs_cluster.search.missing_snapshots import MissingSnapshots

# Longest time in seconds for a peer to give a block that it has. A healthy peer takes 0.3 ms for 110 KB.
HELD_BLOCK_SECONDS: Final = 2.0
# Seconds after which a response is late: at least, and while no response times are known. On a busy machine a process
# waits for 20 ms at times.
MIN_LATE_SECONDS: Final = 0.02
INITIAL_LATE_SECONDS: Final = 1.0
# Hedged requests as a fraction of all requests.
HEDGED_FRACTION: Final = 0.02
# Seconds for which reads wait while two nodes disagree on cluster membership. A longer disagreement needs an operator;
# reads ignore it until IGNORE_DISAGREEMENT_SECONDS have passed.
DISAGREEMENT_SECONDS: Final = 2.0
IGNORE_DISAGREEMENT_SECONDS: Final = 60.0
# Seconds without a heartbeat after which a reader asks another source too: for a peer asked whether it has a block, and
# for a peer asked to fetch it, where the next source may be the origin. On an overloaded machine (six busy processes
# per processor) heartbeats are up to 0.2 s late.
SILENT_HOLDER_SECONDS: Final = 0.3
SILENT_FETCH_SECONDS: Final = 0.5
# Seconds until a reader tries the peer again: at first, and at most. Doubled each time.
MIN_SILENT_PAUSE: Final = 4.0
MAX_SILENT_PAUSE: Final = 60.0
# Consecutive late requests after which a peer is skipped.
MAX_LATE_REQUESTS: Final = 2
# Seconds until a skipped peer is asked again, once: at first, and at most. Doubled each time.
MIN_LATE_PAUSE: Final = 2.0
MAX_LATE_PAUSE: Final = 60.0


class PeerRequest(Protocol):
    """A request to a peer."""

    def cancel(self) -> None:
        """Cancel the request; no reader waits for the response."""


class PeerBlockClient(Protocol):
    """Client for requests to peers: see `cachefs_cluster.peers.client.PeerClient`."""

    def request_block(
        self,
        node: NodeRecord,
        request: BlockRequest,
        how: RequestOptions,
        on_response: Callable[[PeerResponse], None],
        /,
    ) -> PeerRequest:
        """Send a request. *on_response* is called once, in a later turn of the loop."""

    def is_usable(self, node_id: str, /) -> bool:
        """Return whether the node responds, as far as is known."""

    def expected_seconds(self, node: NodeRecord, length: int, /) -> float:
        """Return the expected seconds for a block of *length* bytes that the node has."""

    def last_heartbeat(self, node_id: str, /, *, fetch: bool) -> float:
        """Return the loop time of the node's last sign that it gives blocks (fetch: that it fetches them)."""

    def probe_silent(self, node_id: str, /) -> None:
        """Probe the node: it gives no heartbeat."""


@dataclass(slots=True)
class _Silence:
    noticed_at: float
    backoff: Backoff  # of tries by readers


class PeerHeartbeatHealth:
    """Tracks the peers that give no heartbeat while readers wait: stopped, cut off, or hanging as a whole.

    A live peer sends a heartbeat every 0.1 s while it fetches a block (see `cachefs_cluster.peers.heartbeats`), and
    sends blocks that it has at once. So half a second without a heartbeat says much more than half a second without the
    block, and readers then go on to the next source. Until the peer sends a heartbeat again, readers skip it, except
    for one try per pause. Meanwhile the peer is probed, and counts as dead if the probe fails. Fetches without a
    waiting reader still use the peer until then.

    Peers are kept by node id and kind of request (fetch): a peer may serve the blocks it has, and yet not fetch others.
    All times are of one clock.
    """

    def __init__(self) -> None:
        self._silent: dict[tuple[str, bool], _Silence] = {}

    def keep_known_nodes(self, is_known: Callable[[str], bool]) -> None:
        """Forget peers for whose id *is_known* returns False: they have left the cluster."""
        self._silent = {key: one for key, one in self._silent.items() if is_known(key[0])}

    def silences(self) -> list[tuple[str, bool, float]]:
        """Return (node id, fetch, time at which its silence was last noticed)."""
        return [(node, fetch, one.noticed_at) for (node, fetch), one in self._silent.items()]

    def note_silence(self, node: str, requested_at: float, now: float, *, fetch: bool) -> None:
        """Record that the peer gave no heartbeat since the request at *requested_at*. A peer that does not serve its
        own blocks counts as silent for fetches too."""
        if not fetch:
            self.note_silence(node, requested_at, now, fetch=True)
        silence = self._silent.get((node, fetch))
        if silence is None:
            silence = self._silent[node, fetch] = _Silence(now, Backoff(MIN_SILENT_PAUSE, MAX_SILENT_PAUSE))
        elif requested_at < silence.noticed_at:  # the request was sent before the silence was known
            return
        silence.noticed_at = now
        silence.backoff.note_failure(now)

    def can_request(self, node: str, now: float, last_sign: float, *, fetch: bool) -> bool:
        """Return whether a reader may wait for the peer. If True for a try, no other reader tries until the pause is
        over."""
        silence = self._silent.get((node, fetch))
        if silence is None:
            return True
        if last_sign > silence.noticed_at:
            del self._silent[node, fetch]
            return True
        if not silence.backoff.is_due(now):
            return False
        silence.backoff.restart_pause(now)
        return True


class PeerResponseHealth:
    """Tracks the peers that accept requests, and whose blocks do not arrive while a reader waits.

    Examples: a daemon that hangs behind a healthy peer server, or a disk that hangs. Probes reach such a node, so it
    does not count as dead, and each reader would wait for it anew. Each peer has a backoff by node id and kind of
    request (fetch): a peer may serve the blocks it has, and yet not fetch others. All times are of one clock.
    """

    def __init__(self) -> None:
        self._backoffs: dict[tuple[str, bool], Backoff] = {}

    def keep_known_nodes(self, is_known: Callable[[str], bool]) -> None:
        """Forget peers for whose id *is_known* returns False: they have left the cluster."""
        self._backoffs = {key: one for key, one in self._backoffs.items() if is_known(key[0])}

    def can_request(self, node: str, now: float, *, fetch: bool) -> bool:
        """Return whether the peer is worth a request."""
        late = self._backoffs.get((node, fetch))
        return late is None or late.failures < MAX_LATE_REQUESTS or late.is_due(now)

    def note_request(self, node: str, now: float, *, fetch: bool) -> None:
        """Record a request. While the peer is skipped, this holds back other requests for the next pause."""
        late = self._backoffs.get((node, fetch))
        if late is not None and late.failures >= MAX_LATE_REQUESTS:
            late.restart_pause(now)

    def note_late_response(self, node: str, requested_at: float, now: float, *, fetch: bool) -> None:
        """Record that a block requested at *requested_at* did not arrive in time."""
        late = self._backoffs.setdefault((node, fetch), _backoff())
        if late.failures >= MAX_LATE_REQUESTS and requested_at < late.until - late.pause:
            return  # requested before the peer was skipped
        late.note_failure(now)

    def note_response(self, node: str, *, fetch: bool) -> None:
        """Record any response, with a block or without."""
        self._backoffs.pop((node, fetch), None)


def _backoff() -> Backoff:
    """Return a Backoff whose pause is MIN_LATE_PAUSE when the peer is skipped for the first time."""
    return Backoff(MIN_LATE_PAUSE * 2.0 ** (1 - MAX_LATE_REQUESTS), MAX_LATE_PAUSE)


@dataclass(slots=True)
class SearchCounts:
    """Counts requests to peers since the daemon started."""

    # All requests; those answered without a block; those that failed.
    asked: int = 0
    not_here: int = 0
    failed: int = 0
    # Requests to peers and origins sent beside a late one.
    hedged: int = 0
    # Requests sent beside a peer without heartbeat.
    silent: int = 0
    # Requests that an overloaded peer handed back for this node to fetch; and blocks that this node, while overloaded,
    # handed to other nodes.
    taken: int = 0
    given: int = 0


class PeerSearchState:
    """State shared by all searches: peer health, response times and hedge budget. All times are loop times."""

    def __init__(self, peers: PeerBlockClient, missing_snapshots: MissingSnapshots) -> None:
        self.peers = peers
        self.missing_snapshots = missing_snapshots
        self.counts = SearchCounts()
        self.response_health = PeerResponseHealth()
        self._heartbeat_health = PeerHeartbeatHealth()
        self._hedge_budget = HedgeBudget(HEDGED_FRACTION)
        self._disagreements: dict[str, float] = {}  # by node id: loop time of the first disagreement with this node
        # Seconds to get a block: from peers that had it (False), and from peers that fetched it (True).
        self._block_times = {False: TimesBySize(), True: TimesBySize()}

    def keep_known_nodes(self, is_known: Callable[[str], bool]) -> None:
        """Forget nodes for whose id *is_known* returns False: they have left the cluster."""
        self.response_health.keep_known_nodes(is_known)
        self._heartbeat_health.keep_known_nodes(is_known)
        self._disagreements = {node: since for node, since in self._disagreements.items() if is_known(node)}

    def is_agreement_likely(self, node_id: str, now: float) -> bool:
        """Return whether a node that disagrees about membership is likely to agree soon."""
        since = self._disagreements.get(node_id, -math.inf)
        if now - since > IGNORE_DISAGREEMENT_SECONDS:
            since = self._disagreements[node_id] = now
        return now - since < DISAGREEMENT_SECONDS and self.peers.is_usable(node_id)

    def can_request(self, node: NodeRecord, length: int, seconds: float) -> bool:
        """Return whether the node may respond within *seconds*."""
        return self.peers.is_usable(node.id) and self.peers.expected_seconds(node, length) < seconds

    def silent_nodes(self) -> dict[str, float]:
        """Return the time at which each silent node was noticed, by id: nodes without a heartbeat since the last
        request."""
        found: dict[str, float] = {}
        for node, fetch, noticed in self._heartbeat_health.silences():
            if self.peers.last_heartbeat(node, fetch=fetch) <= noticed:
                found[node] = min(noticed, found.get(node, noticed))
        return found

    def has_heartbeat(self, node_id: str, now: float, *, fetch: bool) -> bool:
        """Return whether the node gives heartbeats, as far as is known, or is due for a try by a reader."""
        return self._heartbeat_health.can_request(
            node_id, now, self.peers.last_heartbeat(node_id, fetch=fetch), fetch=fetch
        )

    def silent_from(self, node_id: str, length: int, sent_at: float, *, fetch: bool) -> float:
        """Return the time at which the node counts as silent, so that it is no longer waited for alone."""
        known = self._block_times[fetch].times_of(length).late_after
        usual = min(known, HELD_BLOCK_SECONDS) if known < math.inf else 0.0
        longest = SILENT_FETCH_SECONDS if fetch else max(SILENT_HOLDER_SECONDS, usual)
        return max(sent_at, self.peers.last_heartbeat(node_id, fetch=fetch)) + longest

    def note_silence(self, node_id: str, sent_at: float, now: float, *, fetch: bool) -> None:
        """Record that the node gave no heartbeat since *sent_at*, so that another node is asked beside it."""
        self._heartbeat_health.note_silence(node_id, sent_at, now, fetch=fetch)
        self.counts.silent += 1
        self.peers.probe_silent(node_id)

    def count_request(self) -> None:
        """Count a request."""
        self.counts.asked += 1
        self._hedge_budget.note_sent()

    def late_after(self, length: int, *, fetch: bool) -> float:
        """Return the seconds after which a block is late."""
        known = self._block_times[fetch].times_of(length).late_after
        return max(MIN_LATE_SECONDS, known) if known < math.inf else INITIAL_LATE_SECONDS

    def note_block_time(self, length: int, seconds: float, now: float, *, fetch: bool) -> None:
        """Record how many *seconds* a block took."""
        self._block_times[fetch].times_of(length).add_request(length, seconds, now)

    def try_hedge(self) -> bool:
        """Return whether another request may be sent beside a late one. If so, it is counted."""
        if not self._hedge_budget.take_hedge():
            return False
        self.counts.hedged += 1
        return True
