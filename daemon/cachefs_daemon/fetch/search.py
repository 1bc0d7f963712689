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
from typing import Final, Protocol

from cachefs.planning.requests.hedging import HedgeBudget
from cachefs.planning.requests.recent_times import TimesBySize
from cachefs_daemon.cluster.view import NodeRecord
from cachefs_daemon.fetch.awaited_snapshots import AWAITED_SECONDS
from cachefs_daemon.fetch.silent_peers import SILENT_FETCH, SILENT_HERE, SilentPeers
from cachefs_daemon.fetch.slots import Slot
from cachefs_daemon.fetch.snapshot_lacks import SnapshotLacks
from cachefs_daemon.fetch.stuck_peers import StuckPeers
from cachefs_daemon.peers.answers import (
    Busy,
    Failed,
    How,
    LacksSnapshot,
    NotHere,
    PeerAnswer,
    PeerBlock,
    TakeIt,
    Wanted,
    Why,
)

# Longest time in seconds for a peer to give a block that it has, also as a fraction of the time left. A healthy peer
# takes 0.3 ms for 110 KB.
HERE_SECONDS: Final = 2.0
HERE_PART: Final = 0.25
# Longest time for a peer that fetches the block, as a fraction of the time left; with a waiting reader also the larger
# of FETCH_SECONDS and FETCH_TIMES the late threshold. The rest of the time is for the origin.
FETCH_PART: Final = 0.5
FETCH_SECONDS: Final = 5.0
FETCH_TIMES: Final = 3.0
# Seconds after which a response is late: at least, and while no response times are known. On a busy machine a process
# waits for 20 ms at times.
LEAST_LATE: Final = 0.02
FIRST_LATE: Final = 1.0
# The same where the next source is the origin, so that a hedge would cost another read of the origin.
ORIGIN_LATE: Final = 1.0
# Seconds by which a timer of the loop may be late. After a longer pause, the messages that peers sent meanwhile are
# read first.
HELD_UP: Final = 0.1
# Hedged requests as a fraction of all requests.
HEDGED: Final = 0.02
# Seconds after a reader begins to wait for an unhurried fetch by a peer until the peer is told.
ASKED_AGAIN: Final = 0.05
# Seconds until peers are asked again after two nodes disagreed on cluster membership: the node that missed a change or
# a restart fetches the news meanwhile. For AGREEING seconds, reads wait in this way. A longer disagreement needs an
# operator; reads ignore it until AT_ODDS seconds have passed.
AGREED: Final = 0.3
AGREEING: Final = 2.0
AT_ODDS: Final = 60.0
# Seconds until the origin is asked beside peers that may wait for the snapshot, once one has said that it lacks it:
# LACKING_SECONDS from that request, plus STAND_IN_SECONDS for the next node to fetch the block, counted from its
# response at least. Only the first node is told to wait; nodes of earlier releases always wait.
LACKING_SECONDS: Final = AWAITED_SECONDS
STAND_IN_SECONDS: Final = 0.5
# Failures after which the origin is asked next: the peer is alive, and another peer would ask the origin too.
_FOR_ORIGIN: Final = (Why.FAILED, Why.LATE, Why.WRONG)
_TOO_LATE: Final = Failed("it has not answered in time", Why.LATE)

Steps = list[tuple[NodeRecord, bool]]


class Asking(Protocol):
    """A request to a peer."""

    def cancel(self) -> None:
        """Cancel the request; no reader waits for the response."""


class Peers(Protocol):
    """Client for requests to peers: see `cachefs_daemon.peers.client.PeerClient`."""

    def ask(self, node: NodeRecord, wanted: Wanted, how: How, answer: Callable[[PeerAnswer], None], /) -> Asking:
        """Send a request. *answer* is called once, in a later turn of the loop."""

    def usable(self, node_id: str, /) -> bool:
        """Return whether the node responds, as far as is known."""

    def expected_seconds(self, node: NodeRecord, length: int, /) -> float:
        """Return the expected seconds for a block of *length* bytes that the node has."""

    def last_sign(self, node_id: str, /, *, fetch: bool) -> float:
        """Return the loop time of the node's last sign that it gives blocks (fetch: that it fetches them)."""

    def doubt(self, node_id: str, /) -> None:
        """Probe the node: it gives no heartbeat."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A block that a peer gave."""

    node: NodeRecord
    block: PeerBlock
    # Loop time of the request.
    asked: float


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


class Experience:
    """State shared by all searches: peer health, response times and hedge budget. All times are loop times."""

    def __init__(self, peers: Peers, lacks: SnapshotLacks) -> None:
        self.peers = peers
        self.lacks = lacks
        self.counts = SearchCounts()
        self.stuck = StuckPeers()
        self._silent = SilentPeers()
        self._budget = HedgeBudget(HEDGED)
        self._disagreed: dict[str, float] = {}  # by node id: loop time of the first disagreement with this node
        # Seconds to get a block: from peers that had it (False), and from peers that fetched it (True).
        self._times = {False: TimesBySize(), True: TimesBySize()}

    def keep(self, is_known: Callable[[str], bool]) -> None:
        """Forget nodes for whose id *is_known* returns False: they have left the cluster."""
        self.stuck.keep(is_known)
        self._silent.keep(is_known)
        self._disagreed = {node: since for node, since in self._disagreed.items() if is_known(node)}

    def may_agree(self, node_id: str, now: float) -> bool:
        """Return whether a node that disagrees about membership is likely to agree soon."""
        since = self._disagreed.get(node_id, -math.inf)
        if now - since > AT_ODDS:
            since = self._disagreed[node_id] = now
        return now - since < AGREEING and self.peers.usable(node_id)

    def can_ask(self, node: NodeRecord, length: int, seconds: float) -> bool:
        """Return whether the node may respond within *seconds*."""
        return self.peers.usable(node.id) and self.peers.expected_seconds(node, length) < seconds

    def silent_nodes(self) -> dict[str, float]:
        """Return the time at which each silent node was noticed, by id: nodes without a heartbeat since the last
        request."""
        found: dict[str, float] = {}
        for node, fetch, noticed in self._silent.noticed_at():
            if self.peers.last_sign(node, fetch=fetch) <= noticed:
                found[node] = min(noticed, found.get(node, noticed))
        return found

    def gives_signs(self, node_id: str, now: float, *, fetch: bool) -> bool:
        """Return whether the node gives heartbeats, as far as is known, or is due for a try by a reader."""
        return self._silent.may_ask(node_id, now, self.peers.last_sign(node_id, fetch=fetch), fetch=fetch)

    def silent_at(self, node_id: str, length: int, asked: float, *, fetch: bool) -> float:
        """Return the time at which the node counts as silent, so that it is no longer waited for alone."""
        known = self._times[fetch].of(length).late_after
        longest = SILENT_FETCH if fetch else max(SILENT_HERE, known if known < HERE_SECONDS else 0.0)
        return max(asked, self.peers.last_sign(node_id, fetch=fetch)) + longest

    def noticed_silence(self, node_id: str, asked: float, now: float, *, fetch: bool) -> None:
        """Record that the node gave no heartbeat since *asked*, so that another node is asked beside it."""
        self._silent.noticed(node_id, asked, now, fetch=fetch)
        self.counts.silent += 1
        self.peers.doubt(node_id)

    def sent(self) -> None:
        """Count a request."""
        self.counts.asked += 1
        self._budget.sent()

    def late_after(self, length: int, *, fetch: bool) -> float:
        """Return the seconds after which a block is late."""
        known = self._times[fetch].of(length).late_after
        return max(LEAST_LATE, known) if known < math.inf else FIRST_LATE

    def came(self, length: int, seconds: float, now: float, *, fetch: bool) -> None:
        """Record how many *seconds* a block took."""
        self._times[fetch].of(length).add(length, seconds, now)

    def may_hedge(self) -> bool:
        """Return whether another request may be sent beside a late one. If so, it is counted."""
        if not self._budget.take():
            return False
        self.counts.hedged += 1
        return True


@dataclass(slots=True, eq=False)
class _Question:
    node: NodeRecord
    # Whether the peer is to fetch the block if it does not have it; whether a reader waited at the time of the request.
    fetch: bool
    hurried: bool
    # Loop times: of the request, when it is late, when it times out, and when to tell the peer that a reader waits.
    asked: float
    late: float
    until: float
    again: float = math.inf
    # Loop time of the next check for a heartbeat.
    doubted: float = math.inf
    asking: Asking = field(init=False)
    is_over: bool = False

    def end(self) -> None:
        self.is_over = True
        self.asking.cancel()


@dataclass(slots=True, eq=False)
class Search:
    """The search for one block. It starts with `begin`. Used on the event loop."""

    wanted: Wanted
    # Nodes to ask in turn, each with whether it should fetch the block from the origin; and a function that computes
    # them anew.
    steps: Steps
    steps_anew: Callable[[], Steps]
    # Slot among reads from peers.
    slot: Slot
    # Whether a reader waits.
    hurried: bool
    # Deadline for the block from any source, in loop time.
    until: float
    # Returns whether this node would fetch the block from the origin in place of an overloaded peer.
    may_take: Callable[[], bool]
    # Called with the block; or, at most once and before that, with None: ask the origin too. A peer may still give the
    # block afterwards.
    found: Callable[[Found | None], None]
    experience: Experience
    # Ask all nodes until one gives the block, as this node cannot get it from the origin.
    insists: bool = False
    _questions: list[_Question] = field(default_factory=list)  # requests in flight
    _asked: set[tuple[str, bool]] = field(default_factory=set)  # (node id, fetch) of all requests so far
    _timer: asyncio.TimerHandle | None = None
    _waits_until: float = math.inf  # deadline for the slot, in loop time; inf once admitted
    _anew: float = math.inf  # loop time at which to retry after a membership disagreement
    _passes_until: float = math.inf  # loop time at which to ask the origin, as nodes lack the snapshot
    _stays: bool = False  # no other node may fetch the block
    _gave_up: bool = False
    _is_over: bool = False

    @property
    def asked(self) -> tuple[str, ...]:
        """Names of the nodes with requests in flight."""
        return tuple(question.node.name for question in self._questions)

    def begin(self) -> None:
        """Start once a slot is free. Calls `found` at once if no node can be asked."""
        now = _now()
        self._waits_until = now + FETCH_PART * (self.until - now)
        if self.slot.ask(self._admitted):
            self._admitted()
        else:
            self._set_timer()  # reads from a hanging peer may hold all slots

    def hurry(self) -> None:
        """Raise the priority: a reader waits from now on."""
        if self._is_over or self._gave_up:
            return
        was_hurried, self.hurried = self.hurried, True
        if self._waits_until < math.inf:
            self.slot.promote()
        if was_hurried:
            return
        now = _now()
        for question in self._questions:
            if question.hurried:
                continue
            question.until = min(question.until, now + self._patience(question.fetch, now))
            question.late = max(question.late, now + LEAST_LATE)
            question.doubted = max(self._silent_at(question), now + LEAST_LATE)
            if question.fetch:
                question.again = now + ASKED_AGAIN
        self._set_timer()

    def stay(self) -> None:
        """Stop other nodes from fetching the block: one of them may be waiting for this node to fetch it."""
        self._stays = True
        self.steps = [(node, fetch) for node, fetch in self.steps if not fetch]
        if self._waits_until < math.inf or any(question.fetch for question in self._questions):
            self._give_up()

    def cancel(self) -> None:
        """End the search: the block has arrived, or is no longer wanted."""
        self._is_over = True
        self._stop_timer()
        self.slot.leave()
        questions, self._questions = self._questions, []
        for question in questions:
            question.end()

    # --- sequence of requests -----------------------------------------------------------------------------------------

    def _admitted(self) -> None:
        self._waits_until = math.inf
        if not (self._is_over or self._gave_up):
            self._next()

    def _next(self) -> None:
        now = _now()
        while self.steps:
            node, fetch = self.steps.pop(0)
            seconds = self._patience(fetch, now)
            if not self._may_ask(node, now, fetch=fetch):
                continue
            if self.experience.can_ask(node, self.wanted.length, seconds):
                self._ask(node, seconds, fetch=fetch)
                return
        self._give_up()

    def _may_ask(self, node: NodeRecord, now: float, *, fetch: bool) -> bool:
        """Return whether the node is healthy enough to wait for."""
        if self.insists:
            return True
        if self.hurried and not self.experience.gives_signs(node.id, now, fetch=fetch):
            return False
        return self.experience.stuck.may_ask(node.id, now, fetch=fetch)

    def _silent_at(self, question: _Question) -> float:
        node = question.node.id
        return self.experience.silent_at(node, self.wanted.length, question.asked, fetch=question.fetch)

    def _patience(self, fetch: bool, now: float) -> float:
        left = self.until - now
        if not fetch:
            return min(HERE_SECONDS, HERE_PART * left)
        if not self.hurried:
            return FETCH_PART * left
        late = self.experience.late_after(self.wanted.length, fetch=True)
        return min(max(FETCH_SECONDS, FETCH_TIMES * late), FETCH_PART * left)

    def _ask(self, node: NodeRecord, seconds: float, *, fetch: bool) -> None:
        now = _now()
        late = now + self.experience.late_after(self.wanted.length, fetch=fetch)
        if not self.steps or self.steps[0][1]:
            late = max(late, now + ORIGIN_LATE)
        may_wait = not self.experience.lacks.is_known(self.wanted.ref.snapshot)
        how = How(now + seconds, fetch, not self.hurried, fetch and self.may_take(), await_snapshot=may_wait)
        question = _Question(node, fetch, self.hurried, now, late, how.until)
        question.doubted = self._silent_at(question)
        question.asking = self.experience.peers.ask(node, self.wanted, how, partial(self._answered, question))
        self._questions.append(question)
        self._asked.add((node.id, fetch))
        self.experience.sent()
        self.experience.stuck.asked(node.id, now, fetch=fetch)
        self._set_timer()

    def _give_up(self) -> None:
        self.steps = []
        if not self._gave_up:
            self._gave_up = True
            self._waits_until = self._passes_until = math.inf
            self.slot.leave()
            self._set_timer()
            self.found(None)

    # --- responses ----------------------------------------------------------------------------------------------------

    def _answered(self, question: _Question, answer: PeerAnswer) -> None:
        if question.is_over:
            return
        question.is_over = True
        self._questions.remove(question)
        self._note_whether_stuck(question, answer)
        if isinstance(answer, PeerBlock) or answer is _TOO_LATE:
            self._measure(question)
        if isinstance(answer, PeerBlock):
            self.cancel()
            self.found(Found(question.node, answer, question.asked))
            return
        counts = self.experience.counts
        if isinstance(answer, NotHere | LacksSnapshot):
            counts.not_here += 1
        elif isinstance(answer, TakeIt):
            counts.taken += 1
        else:
            counts.failed += 1
        if _is_disagreement(answer) and not self._gave_up and self.experience.may_agree(question.node.id, _now()):
            self._anew = _now() + AGREED
            self._set_timer()
        elif isinstance(answer, LacksSnapshot):
            self._pass_over(question)
        elif question.fetch and not (self.insists or _is_for_others(answer)):
            self._give_up()
        elif not self._questions:  # otherwise the next node has been asked already
            self._next()

    def _pass_over(self, question: _Question) -> None:
        """Skip a node that lacks the snapshot: the next one in rendezvous order fetches the block."""
        self.experience.lacks.note(self.wanted.ref.snapshot, question.node.id)
        if self._gave_up or self._questions:  # another node has been asked already
            return
        if not self.insists:
            self._renew_steps()
            self.steps = [(node, fetch) for node, fetch in self.steps if (node.id, fetch) not in self._asked]
            if self.hurried and self._passes_until == math.inf:
                self._passes_until = max(question.asked + LACKING_SECONDS, _now()) + STAND_IN_SECONDS
        self._next()

    def _renew_steps(self) -> None:
        self.steps = [(node, fetch) for node, fetch in self.steps_anew() if not (fetch and self._stays)]

    def _note_whether_stuck(self, question: _Question, answer: PeerAnswer) -> None:
        now, stuck, node = _now(), self.experience.stuck, question.node.id
        if not isinstance(answer, Failed) or answer.why not in (Why.LATE, Why.AWAY):
            stuck.answered(node, fetch=question.fetch)
        elif question.hurried and now - question.asked >= ORIGIN_LATE:
            stuck.late(node, question.asked, now, fetch=question.fetch)

    def _measure(self, question: _Question) -> None:
        # An unhurried fetch may wait long for its turn at the peer.
        if question.hurried or not question.fetch:
            now = _now()
            self.experience.came(self.wanted.length, now - question.asked, now, fetch=question.fetch)

    # --- timers -------------------------------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        self._stop_timer()
        when = min((min(one.until, one.again) for one in self._questions), default=math.inf)
        if self.hurried and not self._gave_up and self._questions:
            when = min(when, self._questions[-1].late, self._questions[-1].doubted)
        when = min(when, self._waits_until, self._anew, self._passes_until)
        if when < math.inf:
            self._timer = asyncio.get_running_loop().call_at(when, self._look)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        now = _now()
        held_up = self._timer is not None and now - self._timer.when() > HELD_UP
        if now >= min(self._waits_until, self._passes_until):
            self._give_up()
        if now >= self._anew:
            self._anew = math.inf
            if not self._gave_up:
                self._renew_steps()
                self._next()
        for question in list(self._questions):
            if now >= question.until:
                question.asking.cancel()
                self._answered(question, _TOO_LATE)
            elif now >= question.again:
                self._ask_again(question, now)
        if self._questions and self.hurried and not self._gave_up:
            self._look_at_last(self._questions[-1], now, held_up=held_up)
        if not self._is_over:
            self._set_timer()

    def _look_at_last(self, question: _Question, now: float, *, held_up: bool) -> None:
        """Ask another node if the last one asked is silent or late."""
        if now >= question.doubted:
            silent_at = self._silent_at(question)
            if held_up or now < silent_at:
                question.doubted = max(silent_at, now + LEAST_LATE)
            else:
                question.doubted = question.late = math.inf
                self.experience.noticed_silence(question.node.id, question.asked, now, fetch=question.fetch)
                self._next()
                return
        if now >= question.late:
            question.late = math.inf
            if self.experience.may_hedge():
                self._next()

    def _ask_again(self, question: _Question, now: float) -> None:
        """Repeat the request, to tell a peer with an unhurried fetch that a reader waits."""
        question.again = math.inf
        if self.experience.can_ask(question.node, self.wanted.length, question.until - now):
            question.end()
            self._questions.remove(question)
            self._ask(question.node, question.until - now, fetch=True)


def _is_for_others(answer: PeerAnswer) -> bool:
    """Return whether to try another peer: this one cannot fetch the block, and other nodes would find the same."""
    return isinstance(answer, Busy) or (isinstance(answer, Failed) and answer.why not in _FOR_ORIGIN)


def _is_disagreement(answer: PeerAnswer) -> bool:
    return isinstance(answer, Failed) and answer.why in (Why.EPOCH, Why.STRANGER)


def _now() -> float:
    return asyncio.get_running_loop().time()
