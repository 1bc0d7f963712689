"""The search for one block among the nodes of a cluster, from one to the next until one gives it.

One that is late has the next one asked beside it, and what comes first counts: of those that live, for 2 % of all
questions at most; of one that gives no sign of life, for each reader. Where none gives the block, the origin is asked.
So no reader waits long for a peer while there is another source.
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

# Seconds that a peer has at most to give a block that it has, and the part of the time that is left. One that is well
# takes 0.3 ms for 110 KB.
HERE_SECONDS: Final = 2.0
HERE_PART: Final = 0.25
# The part of the time that a peer may take that is to bring the block, and seconds where a reader waits: so many at
# least, and so many times what is late. What is left then is for the origin.
FETCH_PART: Final = 0.5
FETCH_SECONDS: Final = 5.0
FETCH_TIMES: Final = 3.0
# Seconds after which an answer is late, at least, and while nobody knows how long answers take. A busy machine lets
# a process wait for 20 ms at times.
LEAST_LATE: Final = 0.02
FIRST_LATE: Final = 1.0
# The same where no other node may have the block, so that another read of the origin would come of it.
ORIGIN_LATE: Final = 1.0
# Seconds by which the loop may be late. After a longer pause, what peers have sent meanwhile is read first.
HELD_UP: Final = 0.1
# Second questions, as a share of all.
HEDGED: Final = 0.02
# Seconds after a reader has come to wait for a block that a peer brings without haste, until the peer is told so.
ASKED_AGAIN: Final = 0.05
# Seconds until peers are asked anew where two nodes did not agree on who is in the cluster: the one that has missed a
# change, or a restart, asks for it meanwhile. For so many seconds reads wait for that; then they agree, or they never
# will until somebody mends a list.
AGREED: Final = 0.3
AGREEING: Final = 2.0
AT_ODDS: Final = 60.0
# Seconds until the origin is asked beside nodes that may wait for the snapshot, once one has said that it lacks it:
# from the question to that one on, and from its answer on at least, so that the next node can bring the block. Only the
# first node is told to wait; nodes of earlier releases all do.
LACKING_SECONDS: Final = AWAITED_SECONDS
STAND_IN_SECONDS: Final = 0.5
# Reasons for which the origin is asked next, and no other peer. The peer lives; and another one would ask the origin.
_FOR_ORIGIN: Final = (Why.FAILED, Why.LATE, Why.WRONG)
_TOO_LATE: Final = Failed("it has not answered in time", Why.LATE)

Steps = list[tuple[NodeRecord, bool]]


class Asking(Protocol):
    """A question to a peer."""

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""


class Peers(Protocol):
    """What asks peers: see `cachefs_daemon.peers.client.PeerClient`."""

    def ask(self, node: NodeRecord, wanted: Wanted, how: How, answer: Callable[[PeerAnswer], None], /) -> Asking:
        """*answer* is called once, in a later turn of the loop."""

    def usable(self, node_id: str, /) -> bool:
        """Does it answer, as far as is known?"""

    def expected_seconds(self, node: NodeRecord, length: int, /) -> float:
        """For a block of so many bytes that the node has."""

    def last_sign(self, node_id: str, /, *, fetch: bool) -> float:
        """Loop time at which it last showed that it gives blocks (fetch: that it brings them)."""

    def doubt(self, node_id: str, /) -> None:
        """It gives no sign: find out whether it lives."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A peer gave the block."""

    node: NodeRecord
    block: PeerBlock
    # Loop time at which it was asked.
    asked: float


@dataclass(slots=True)
class SearchCounts:
    """Questions to peers since the daemon started."""

    # All of them; those that were answered without a block; those that failed.
    asked: int = 0
    not_here: int = 0
    failed: int = 0
    # Those, and reads of an origin, that came beside one that was late.
    hedged: int = 0
    # The same beside one that gave no sign of life.
    silent: int = 0
    # Those that were given back, since the peer was behind and this node was not; and blocks that this node has given
    # to others for the same reason.
    taken: int = 0
    given: int = 0


class Experience:
    """What is learned from all searches. Times are loop times."""

    def __init__(self, peers: Peers, lacks: SnapshotLacks) -> None:
        self.peers = peers
        self.lacks = lacks
        self.counts = SearchCounts()
        self.stuck = StuckPeers()
        self._silent = SilentPeers()
        self._budget = HedgeBudget(HEDGED)
        self._disagreed: dict[str, float] = {}  # by id of a node: loop time since when it has not agreed with this one
        # How long it takes to get a block: of peers that had it, and of those that were to bring it.
        self._times = {False: TimesBySize(), True: TimesBySize()}

    def keep(self, is_known: Callable[[str], bool]) -> None:
        """Forget nodes that have left the cluster: those of which *is_known* says no by their id."""
        self.stuck.keep(is_known)
        self._silent.keep(is_known)
        self._disagreed = {node: since for node, since in self._disagreed.items() if is_known(node)}

    def may_agree(self, node_id: str, now: float) -> bool:
        """A node did not agree with this one. Will it in a moment?"""
        since = self._disagreed.get(node_id, -math.inf)
        if now - since > AT_ODDS:
            since = self._disagreed[node_id] = now
        return now - since < AGREEING and self.peers.usable(node_id)

    def can_ask(self, node: NodeRecord, length: int, seconds: float) -> bool:
        """May it answer within so many seconds?"""
        return self.peers.usable(node.id) and self.peers.expected_seconds(node, length) < seconds

    def silent_nodes(self) -> dict[str, float]:
        """Nodes that gave no sign of life when they were last asked: when that was noticed, by id."""
        found: dict[str, float] = {}
        for node, fetch, noticed in self._silent.noticed_at():
            if self.peers.last_sign(node, fetch=fetch) <= noticed:
                found[node] = min(noticed, found.get(node, noticed))
        return found

    def gives_signs(self, node_id: str, now: float, *, fetch: bool) -> bool:
        """Does it, as far as is known, or is it time for a reader to try?"""
        return self._silent.may_ask(node_id, now, self.peers.last_sign(node_id, fetch=fetch), fetch=fetch)

    def silent_at(self, node_id: str, length: int, asked: float, *, fetch: bool) -> float:
        """When it will have given no sign for so long, since it was asked, that it is not waited for alone."""
        known = self._times[fetch].of(length).late_after
        longest = SILENT_FETCH if fetch else max(SILENT_HERE, known if known < HERE_SECONDS else 0.0)
        return max(asked, self.peers.last_sign(node_id, fetch=fetch)) + longest

    def noticed_silence(self, node_id: str, asked: float, now: float, *, fetch: bool) -> None:
        """It has given no sign for that long: another one is asked beside it."""
        self._silent.noticed(node_id, asked, now, fetch=fetch)
        self.counts.silent += 1
        self.peers.doubt(node_id)

    def sent(self) -> None:
        """A question was sent."""
        self.counts.asked += 1
        self._budget.sent()

    def late_after(self, length: int, *, fetch: bool) -> float:
        """Seconds after which a block is late."""
        known = self._times[fetch].of(length).late_after
        return max(LEAST_LATE, known) if known < math.inf else FIRST_LATE

    def came(self, length: int, seconds: float, now: float, *, fetch: bool) -> None:
        """A block has come after so many seconds."""
        self._times[fetch].of(length).add(length, seconds, now)

    def may_hedge(self) -> bool:
        """May another one be asked beside one that is late? If so, it is counted."""
        if not self._budget.take():
            return False
        self.counts.hedged += 1
        return True


@dataclass(slots=True, eq=False)
class _Question:
    """To one peer."""

    node: NodeRecord
    # Whether the peer is to bring the block where it does not have it; whether a reader waited as it was asked.
    fetch: bool
    hurried: bool
    # Loop times: when it was asked, is late, and must have answered; and when it is told that a reader waits.
    asked: float
    late: float
    until: float
    again: float = math.inf
    # When it is looked at whether the peer gives any sign.
    doubted: float = math.inf
    asking: Asking = field(init=False)
    is_over: bool = False

    def end(self) -> None:
        """Its answer is not waited for any more."""
        self.is_over = True
        self.asking.cancel()


@dataclass(slots=True, eq=False)
class Search:
    """For one block. It does nothing until `begin`. Used on the event loop."""

    wanted: Wanted
    # Whom to ask in turn, and whether to have them bring it from the origin; and the same as of later.
    steps: Steps
    steps_anew: Callable[[], Steps]
    # Among reads from peers.
    slot: Slot
    # Does a reader wait?
    hurried: bool
    # Loop time until which the block must have come, from wherever.
    until: float
    # Would this node bring it from the origin in place of a peer that is behind?
    may_take: Callable[[], bool]
    # Is called with the block; or, at most once and before that, with None: the origin is to be asked, and the block
    # may come from a peer all the same.
    found: Callable[[Found | None], None]
    experience: Experience
    # Ask all of them until one gives it: this node cannot.
    insists: bool = False
    _questions: list[_Question] = field(default_factory=list)  # that are not answered yet
    _asked: set[tuple[str, bool]] = field(default_factory=set)  # ids of nodes, and whether they were to bring it
    _timer: asyncio.TimerHandle | None = None
    _waits_until: float = math.inf  # for its slot, in loop time; inf once it has one
    _anew: float = math.inf  # loop time at which others are asked, since two nodes did not agree
    _passes_until: float = math.inf  # loop time at which the origin is asked, since nodes lack the snapshot
    _stays: bool = False  # has nobody else bring it
    _gave_up: bool = False
    _is_over: bool = False

    @property
    def asked(self) -> tuple[str, ...]:
        """Names of the nodes whose answers it waits for."""
        return tuple(question.node.name for question in self._questions)

    def begin(self) -> None:
        """Look for it, once there is a slot. Where nobody can be asked, `found` is called at once."""
        now = _now()
        self._waits_until = now + FETCH_PART * (self.until - now)
        if self.slot.ask(self._admitted):
            self._admitted()
        else:
            self._set_timer()  # reads from a peer that hangs may have all slots

    def hurry(self) -> None:
        """A reader waits for it from now on."""
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
        """Have no other node bring it any more: it may be waiting for this one to bring it."""
        self._stays = True
        self.steps = [(node, fetch) for node, fetch in self.steps if not fetch]
        if self._waits_until < math.inf or any(question.fetch for question in self._questions):
            self._give_up()

    def cancel(self) -> None:
        """Nobody wants it any more, or it has come."""
        self._is_over = True
        self._stop_timer()
        self.slot.leave()
        questions, self._questions = self._questions, []
        for question in questions:
            question.end()

    # --- one after the other ------------------------------------------------------------------------------------------

    def _admitted(self) -> None:
        self._waits_until = math.inf
        if not (self._is_over or self._gave_up):
            self._next()

    def _next(self) -> None:
        """Ask the next one."""
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
        """Is it worth to wait for that one?"""
        if self.insists:
            return True
        if self.hurried and not self.experience.gives_signs(node.id, now, fetch=fetch):
            return False
        return self.experience.stuck.may_ask(node.id, now, fetch=fetch)

    def _silent_at(self, question: _Question) -> float:
        node = question.node.id
        return self.experience.silent_at(node, self.wanted.length, question.asked, fetch=question.fetch)

    def _patience(self, fetch: bool, now: float) -> float:
        """Seconds that a peer may take."""
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
        """It is up to the origin."""
        self.steps = []
        if not self._gave_up:
            self._gave_up = True
            self._waits_until = self._passes_until = math.inf
            self.slot.leave()
            self._set_timer()
            self.found(None)

    # --- answers ------------------------------------------------------------------------------------------------------

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
        elif not self._questions:  # else the next one was asked already, beside this one
            self._next()

    def _pass_over(self, question: _Question) -> None:
        """A node lacks the snapshot: have the next one in rendezvous order bring the block."""
        self.experience.lacks.note(self.wanted.ref.snapshot, question.node.id)
        if self._gave_up or self._questions:  # another one was asked already, beside this one
            return
        if not self.insists:
            self._renew_steps()
            self.steps = [(node, fetch) for node, fetch in self.steps if (node.id, fetch) not in self._asked]
            if self.hurried and self._passes_until == math.inf:
                self._passes_until = max(question.asked + LACKING_SECONDS, _now()) + STAND_IN_SECONDS
        self._next()

    def _renew_steps(self) -> None:
        """Begin again with the nodes that come into question now."""
        self.steps = [(node, fetch) for node, fetch in self.steps_anew() if not (fetch and self._stays)]

    def _note_whether_stuck(self, question: _Question, answer: PeerAnswer) -> None:
        now, stuck, node = _now(), self.experience.stuck, question.node.id
        if not isinstance(answer, Failed) or answer.why not in (Why.LATE, Why.AWAY):
            stuck.answered(node, fetch=question.fetch)
        elif question.hurried and now - question.asked >= ORIGIN_LATE:
            stuck.late(node, question.asked, now, fetch=question.fetch)

    def _measure(self, question: _Question) -> None:
        # What a peer brings without haste may wait long for its turn there.
        if question.hurried or not question.fetch:
            now = _now()
            self.experience.came(self.wanted.length, now - question.asked, now, fetch=question.fetch)

    # --- time ---------------------------------------------------------------------------------------------------------

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
        """Something is late."""
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
        """Is another one to be asked beside the one that was asked last?"""
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
        """Let a peer that brings the block without haste know that a reader waits."""
        question.again = math.inf
        if self.experience.can_ask(question.node, self.wanted.length, question.until - now):
            question.end()
            self._questions.remove(question)
            self._ask(question.node, question.until - now, fetch=True)


def _is_for_others(answer: PeerAnswer) -> bool:
    """Should another peer bring the block, since the one that was asked cannot, and others will ask that one too?"""
    return isinstance(answer, Busy) or (isinstance(answer, Failed) and answer.why not in _FOR_ORIGIN)


def _is_disagreement(answer: PeerAnswer) -> bool:
    """Do two nodes not agree on who is in the cluster?"""
    return isinstance(answer, Failed) and answer.why in (Why.EPOCH, Why.STRANGER)


def _now() -> float:
    return asyncio.get_running_loop().time()
