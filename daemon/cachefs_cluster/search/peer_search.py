"""Searches the nodes of a cluster for one block, one peer after the other, until one gives it.

If a peer is late, the next one is asked beside it, and the first block to arrive counts. Hedges beside live peers are
limited to 2 % of all requests; beside a peer without heartbeat, each reader asks the next one. If no peer gives the
block, the origin is asked. So no reader waits long for a peer while there is another source.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from cachefs_cluster.membership.view import NodeRecord
from cachefs_cluster.peers.peer_requests import (
    BlockNotFound,
    BlockRequest,
    FailureKind,
    FetchYourself,
    PeerBlock,
    PeerOverloaded,
    PeerRequestFailed,
    PeerResponse,
    RequestOptions,
    SnapshotNotFound,
)
from cachefs_cluster.search.fetches_for_peers import AWAITED_SECONDS
from cachefs_cluster.search.search_state import HELD_BLOCK_SECONDS, MIN_LATE_SECONDS, PeerRequest, PeerSearchState
from cachefs_daemon.fetch.concurrency_limiter import Permit
from cachefs_daemon.ports import FoundBlock, FoundCallback

# Longest time for a peer to give a block that it has, as a fraction of the time left (see also HELD_BLOCK_SECONDS).
HELD_BLOCK_FRACTION: Final = 0.25
# Longest time for a peer that fetches the block, as a fraction of the time left; with a waiting reader also the larger
# of FETCH_SECONDS and FETCH_LATE_FACTOR the late threshold. The rest of the time is for the origin.
FETCH_FRACTION: Final = 0.5
FETCH_SECONDS: Final = 5.0
FETCH_LATE_FACTOR: Final = 3.0
# Seconds after which a response is late where the next source is the origin, so that a hedge would cost another read of
# the origin.
ORIGIN_LATE_SECONDS: Final = 1.0
# Seconds by which a timer of the loop may be late. After a longer pause, the messages that peers sent meanwhile are
# read first.
LOOP_DELAY_SECONDS: Final = 0.1
# Seconds after a reader begins to wait for an unhurried fetch by a peer until the peer is told.
REPEAT_REQUEST_SECONDS: Final = 0.05
# Seconds until peers are asked again after two nodes disagreed on cluster membership: the node that missed a change or
# a restart fetches the news meanwhile.
RETRY_DISAGREEMENT_SECONDS: Final = 0.3
# Seconds until the origin is asked beside peers that may wait for the snapshot, once one has said that it lacks it:
# AWAIT_SNAPSHOT_SECONDS from that request, plus STAND_IN_SECONDS for the next node to fetch the block, counted from its
# response at least. Only the first node is told to wait; nodes of earlier releases always wait.
AWAIT_SNAPSHOT_SECONDS: Final = AWAITED_SECONDS
STAND_IN_SECONDS: Final = 0.5
# Failures after which the origin is asked next: the peer is alive, and another peer would ask the origin too.
_TRY_ORIGIN_NEXT: Final = (FailureKind.FAILED, FailureKind.LATE, FailureKind.WRONG_BYTES)
_TIMED_OUT: Final = PeerRequestFailed("it has not responded in time", FailureKind.LATE)

SearchSteps = list[tuple[NodeRecord, bool]]


@dataclass(slots=True, eq=False)
class _SentRequest:
    node: NodeRecord
    # Whether the peer is to fetch the block if it does not have it; whether a reader waited at the time of the request.
    fetch: bool
    has_reader: bool
    # Loop times: of the request, when it is late, when it times out, and when to tell the peer that a reader waits.
    sent_at: float
    late_at: float
    times_out_at: float
    repeat_at: float = math.inf
    # Loop time of the next check for a heartbeat.
    heartbeat_check_at: float = math.inf
    request: PeerRequest = field(init=False)
    is_over: bool = False

    def cancel(self) -> None:
        self.is_over = True
        self.request.cancel()


@dataclass(slots=True, eq=False)
class PeerSearch:
    """The search for one block. It starts with `start`. Used on the event loop."""

    request: BlockRequest
    # Nodes to ask in turn, each with whether it should fetch the block from the origin; and a function that computes
    # them anew.
    steps: SearchSteps
    recompute_steps: Callable[[], SearchSteps]
    # Permit among reads from peers.
    permit: Permit
    # Whether a reader waits.
    has_reader: bool
    # Deadline for the block from any source, in loop time.
    deadline: float
    # Returns whether this node would fetch the block from the origin in place of an overloaded peer.
    can_take_over: Callable[[], bool]
    on_result: FoundCallback
    state: PeerSearchState
    # Ask all nodes until one gives the block, as this node cannot get it from the origin.
    searches_all_nodes: bool = False
    _requests: list[_SentRequest] = field(default_factory=list)  # requests in flight
    _requested_nodes: set[tuple[str, bool]] = field(default_factory=set)  # (node id, fetch) of all requests so far
    _timer: asyncio.TimerHandle | None = None
    _permit_deadline: float = math.inf  # deadline for the permit, in loop time; inf once admitted
    _retry_at: float = math.inf  # loop time at which to retry after a membership disagreement
    _origin_at: float = math.inf  # loop time at which to ask the origin, as nodes lack the snapshot
    _has_no_delegation: bool = False  # no other node may fetch the block
    _has_given_up: bool = False
    _is_over: bool = False

    @property
    def requested_nodes(self) -> tuple[str, ...]:
        """Names of the nodes with requests in flight."""
        return tuple(sent.node.name for sent in self._requests)

    def start(self) -> None:
        """Start once a permit is free. Calls `on_result` at once if no node can be asked."""
        now = _now()
        self._permit_deadline = now + FETCH_FRACTION * (self.deadline - now)
        if self.permit.request(self._on_permit):
            self._on_permit()
        else:
            self._set_timer()  # reads from a hanging peer may hold all permits

    def raise_priority(self) -> None:
        """Raise the priority: a reader waits from now on."""
        if self._is_over or self._has_given_up:
            return
        was_hurried, self.has_reader = self.has_reader, True
        if self._permit_deadline < math.inf:
            self.permit.promote()
        if was_hurried:
            return
        now = _now()
        for sent in self._requests:
            if sent.has_reader:
                continue
            sent.times_out_at = min(sent.times_out_at, now + self._response_seconds(sent.fetch, now))
            sent.late_at = max(sent.late_at, now + MIN_LATE_SECONDS)
            sent.heartbeat_check_at = max(self._silent_from(sent), now + MIN_LATE_SECONDS)
            if sent.fetch:
                sent.repeat_at = now + REPEAT_REQUEST_SECONDS
        self._set_timer()

    def forbid_delegation(self) -> None:
        """Stop other nodes from fetching the block: one of them may be waiting for this node to fetch it."""
        self._has_no_delegation = True
        self.steps = [(node, fetch) for node, fetch in self.steps if not fetch]
        if self._permit_deadline < math.inf or any(sent.fetch for sent in self._requests):
            self._give_up()

    def cancel(self) -> None:
        """End the search: the block has arrived, or is no longer wanted."""
        self._is_over = True
        self._stop_timer()
        self.permit.cancel_or_release()
        requests, self._requests = self._requests, []
        for sent in requests:
            sent.cancel()

    # --- sequence of requests -----------------------------------------------------------------------------------------

    def _on_permit(self) -> None:
        self._permit_deadline = math.inf
        if not (self._is_over or self._has_given_up):
            self._request_next_node()

    def _request_next_node(self) -> None:
        now = _now()
        while self.steps:
            node, fetch = self.steps.pop(0)
            seconds = self._response_seconds(fetch, now)
            if not self._can_request(node, now, fetch=fetch):
                continue
            if self.state.can_request(node, self.request.length, seconds):
                self._send_request(node, seconds, fetch=fetch)
                return
        self._give_up()

    def _can_request(self, node: NodeRecord, now: float, *, fetch: bool) -> bool:
        """Return whether the node is healthy enough to wait for."""
        if self.searches_all_nodes:
            return True
        if self.has_reader and not self.state.has_heartbeat(node.id, now, fetch=fetch):
            return False
        return self.state.response_health.can_request(node.id, now, fetch=fetch)

    def _silent_from(self, sent: _SentRequest) -> float:
        node = sent.node.id
        return self.state.silent_from(node, self.request.length, sent.sent_at, fetch=sent.fetch)

    def _response_seconds(self, fetch: bool, now: float) -> float:
        left = self.deadline - now
        if not fetch:
            return min(HELD_BLOCK_SECONDS, HELD_BLOCK_FRACTION * left)
        if not self.has_reader:
            return FETCH_FRACTION * left
        late = self.state.late_after(self.request.length, fetch=True)
        return min(max(FETCH_SECONDS, FETCH_LATE_FACTOR * late), FETCH_FRACTION * left)

    def _send_request(self, node: NodeRecord, seconds: float, *, fetch: bool) -> None:
        now = _now()
        late = now + self.state.late_after(self.request.length, fetch=fetch)
        if not self.steps or self.steps[0][1]:
            late = max(late, now + ORIGIN_LATE_SECONDS)
        may_wait = not self.state.missing_snapshots.has_recent_report(self.request.ref.snapshot)
        how = RequestOptions(
            now + seconds, fetch, not self.has_reader, fetch and self.can_take_over(), await_snapshot=may_wait
        )
        sent = _SentRequest(node, fetch, self.has_reader, now, late, how.deadline)
        sent.heartbeat_check_at = self._silent_from(sent)
        sent.request = self.state.peers.request_block(node, self.request, how, partial(self._handle_response, sent))
        self._requests.append(sent)
        self._requested_nodes.add((node.id, fetch))
        self.state.count_request()
        self.state.response_health.note_request(node.id, now, fetch=fetch)
        self._set_timer()

    def _give_up(self) -> None:
        self.steps = []
        if not self._has_given_up:
            self._has_given_up = True
            self._permit_deadline = self._origin_at = math.inf
            self.permit.cancel_or_release()
            self._set_timer()
            self.on_result(None)

    # --- responses ----------------------------------------------------------------------------------------------------

    def _handle_response(self, sent: _SentRequest, response: PeerResponse) -> None:
        if sent.is_over:
            return
        sent.is_over = True
        self._requests.remove(sent)
        self._note_response_health(sent, response)
        if isinstance(response, PeerBlock) or response is _TIMED_OUT:
            self._note_block_time(sent)
        if isinstance(response, PeerBlock):
            self.cancel()
            node = sent.node
            self.on_result(FoundBlock(response.data, response.checksums, node.id, node.name, sent.sent_at))
            return
        counts = self.state.counts
        if isinstance(response, BlockNotFound | SnapshotNotFound):
            counts.not_here += 1
        elif isinstance(response, FetchYourself):
            counts.taken += 1
        else:
            counts.failed += 1
        if (
            _is_disagreement(response)
            and not self._has_given_up
            and self.state.is_agreement_likely(sent.node.id, _now())
        ):
            self._retry_at = _now() + RETRY_DISAGREEMENT_SECONDS
            self._set_timer()
        elif isinstance(response, SnapshotNotFound):
            self._skip_node(sent)
        elif sent.fetch and not (self.searches_all_nodes or _can_others_help(response)):
            self._give_up()
        elif not self._requests:  # otherwise the next node has been asked already
            self._request_next_node()

    def _skip_node(self, sent: _SentRequest) -> None:
        """Skip a node that lacks the snapshot: the next one in rendezvous order fetches the block."""
        self.state.missing_snapshots.note_missing(self.request.ref.snapshot, sent.node.id)
        if self._has_given_up or self._requests:  # another node has been asked already
            return
        if not self.searches_all_nodes:
            self._renew_steps()
            self.steps = [(node, fetch) for node, fetch in self.steps if (node.id, fetch) not in self._requested_nodes]
            if self.has_reader and self._origin_at == math.inf:
                self._origin_at = max(sent.sent_at + AWAIT_SNAPSHOT_SECONDS, _now()) + STAND_IN_SECONDS
        self._request_next_node()

    def _renew_steps(self) -> None:
        self.steps = [
            (node, fetch) for node, fetch in self.recompute_steps() if not (fetch and self._has_no_delegation)
        ]

    def _note_response_health(self, sent: _SentRequest, response: PeerResponse) -> None:
        now, stuck, node = _now(), self.state.response_health, sent.node.id
        late = (FailureKind.LATE, FailureKind.UNREACHABLE)
        if not isinstance(response, PeerRequestFailed) or response.kind not in late:
            stuck.note_response(node, fetch=sent.fetch)
        elif sent.has_reader and now - sent.sent_at >= ORIGIN_LATE_SECONDS:
            stuck.note_late_response(node, sent.sent_at, now, fetch=sent.fetch)

    def _note_block_time(self, sent: _SentRequest) -> None:
        # An unhurried fetch may wait long for its turn at the peer.
        if sent.has_reader or not sent.fetch:
            now = _now()
            self.state.note_block_time(self.request.length, now - sent.sent_at, now, fetch=sent.fetch)

    # --- timers -------------------------------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        self._stop_timer()
        when = min((min(request.times_out_at, request.repeat_at) for request in self._requests), default=math.inf)
        if self.has_reader and not self._has_given_up and self._requests:
            when = min(when, self._requests[-1].late_at, self._requests[-1].heartbeat_check_at)
        when = min(when, self._permit_deadline, self._retry_at, self._origin_at)
        if when < math.inf:
            self._timer = asyncio.get_running_loop().call_at(when, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        now = _now()
        is_delayed = self._timer is not None and now - self._timer.when() > LOOP_DELAY_SECONDS
        if now >= min(self._permit_deadline, self._origin_at):
            self._give_up()
        if now >= self._retry_at:
            self._retry_at = math.inf
            if not self._has_given_up:
                self._renew_steps()
                self._request_next_node()
        for sent in list(self._requests):
            if now >= sent.times_out_at:
                sent.request.cancel()
                self._handle_response(sent, _TIMED_OUT)
            elif now >= sent.repeat_at:
                self._repeat_request(sent, now)
        if self._requests and self.has_reader and not self._has_given_up:
            self._check_last_request(self._requests[-1], now, is_delayed=is_delayed)
        if not self._is_over:
            self._set_timer()

    def _check_last_request(self, sent: _SentRequest, now: float, *, is_delayed: bool) -> None:
        """Ask another node if the last one asked is silent or late."""
        if now >= sent.heartbeat_check_at:
            silent_at = self._silent_from(sent)
            if is_delayed or now < silent_at:
                sent.heartbeat_check_at = max(silent_at, now + MIN_LATE_SECONDS)
            else:
                sent.heartbeat_check_at = sent.late_at = math.inf
                self.state.note_silence(sent.node.id, sent.sent_at, now, fetch=sent.fetch)
                self._request_next_node()
                return
        if now >= sent.late_at:
            sent.late_at = math.inf
            if self.state.try_hedge():
                self._request_next_node()

    def _repeat_request(self, sent: _SentRequest, now: float) -> None:
        """Repeat the request, to tell a peer with an unhurried fetch that a reader waits."""
        sent.repeat_at = math.inf
        if self.state.can_request(sent.node, self.request.length, sent.times_out_at - now):
            sent.cancel()
            self._requests.remove(sent)
            self._send_request(sent.node, sent.times_out_at - now, fetch=True)


def _can_others_help(response: PeerResponse) -> bool:
    """Return whether to try another peer: this one cannot fetch the block, and other nodes would find the same."""
    return isinstance(response, PeerOverloaded) or (
        isinstance(response, PeerRequestFailed) and response.kind not in _TRY_ORIGIN_NEXT
    )


def _is_disagreement(response: PeerResponse) -> bool:
    kinds = (FailureKind.OTHER_EPOCH, FailureKind.WRONG_NODE)
    return isinstance(response, PeerRequestFailed) and response.kind in kinds


def _now() -> float:
    return asyncio.get_running_loop().time()
