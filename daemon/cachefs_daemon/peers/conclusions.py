"""Turns the outcome of one requested block into a response to its requester."""

from typing import Final

from cachefs_daemon.cluster.handshake import Verdict
from cachefs_daemon.peers import protocol
from cachefs_daemon.peers.answers import BUSY, LACKS_SNAPSHOT, NOT_HERE, TAKE_IT, Failed, PeerBlock, Why
from cachefs_daemon.peers.connection import Outcome, WrongBytes
from cachefs_daemon.peers.peer import Ask
from cachefs_daemon.runtime.errorlog import ErrorLog

# The kind of failure for each verdict that refuses a request.
REASONS: Final = {
    Verdict.OLD_EPOCH.value: Why.EPOCH,
    Verdict.OTHER_LIST.value: Why.EPOCH,
    Verdict.OTHER_NODE.value: Why.STRANGER,
    Verdict.OTHER_CLUSTER.value: Why.STRANGER,
    Verdict.OTHER_INCARNATION.value: Why.STRANGER,
    Verdict.OTHER_PROTOCOL.value: Why.REFUSED,
    Verdict.STRANGER.value: Why.REFUSED,
    Verdict.UNPROVEN.value: Why.REFUSED,
}
# Verdicts that an administrator has to act on: they are logged.
TOLD: Final = (
    Verdict.OTHER_LIST, Verdict.OTHER_NODE, Verdict.OTHER_CLUSTER, Verdict.OTHER_PROTOCOL, Verdict.STRANGER,
    Verdict.UNPROVEN,
)  # fmt: skip


def conclude(ask: Ask, outcome: Outcome, now: float, errors: ErrorLog) -> bool:
    """Answer the requester, and count the outcome. Return whether to ask the peer again after wrong bytes."""
    peer = ask.peer
    counters = peer.counters
    if isinstance(outcome, PeerBlock):
        counters.blocks += 1
        counters.bytes += ask.wanted.length
        counters.seconds += now - ask.began
        peer.recent.append(now - ask.began)
        peer.liveness.gave()
        ask.end(outcome)
    elif isinstance(outcome, WrongBytes):
        return _conclude_wrong(ask, outcome, now, errors)
    elif outcome.status == protocol.NOT_HERE:
        counters.not_here += 1
        ask.end(LACKS_SNAPSHOT if outcome.text == protocol.LACKS_SNAPSHOT else NOT_HERE)
    elif outcome.status == protocol.TAKE_IT:
        counters.given_back += 1
        ask.end(TAKE_IT)
    elif outcome.status == protocol.BUSY:
        counters.busy += 1
        peer.liveness.busy(now)
        ask.end(BUSY)
    else:
        counters.failures += 1
        ask.end(Failed(f"node {peer.record.name}: {outcome.text}"))
    return False


def _conclude_wrong(ask: Ask, wrong: WrongBytes, now: float, errors: ErrorLog) -> bool:
    peer = ask.peer
    if wrong.moved:
        peer.counters.not_here += 1
        ask.end(NOT_HERE)
        return False
    peer.counters.wrong += 1
    name, key = peer.record.name, ask.wanted.key.hex()
    if not ask.check:
        # The peer checks its own copy: if that is damaged, the peer repairs it and answers NOT_HERE.
        errors.add(f"node {name}", f"node {name} gave other bytes for block {key}; it is to look at its copy")
        ask.check, ask.batch = True, None
        return True
    text = f"node {name} gave other bytes for block {key} twice; it is not asked for it for a minute"
    errors.add(f"node {name}", text)
    peer.note_wrong(ask.wanted.key, now)
    ask.end(Failed(text, Why.WRONG))
    return False
