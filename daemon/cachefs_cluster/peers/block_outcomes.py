"""Turns the outcome of one requested block into a response to its requester."""

from typing import Final

from cachefs_cluster.membership.handshake import Verdict
from cachefs_cluster.peers import protocol
from cachefs_cluster.peers.connection import BlockOutcome, WrongBytes
from cachefs_cluster.peers.peer import PendingBlock
from cachefs_cluster.peers.peer_requests import (
    BLOCK_NOT_FOUND,
    FETCH_YOURSELF,
    PEER_OVERLOADED,
    SNAPSHOT_NOT_FOUND,
    FailureKind,
    PeerBlock,
    PeerRequestFailed,
)
from cachefs_daemon.runtime.error_log import ErrorLog

# The kind of failure for each verdict that refuses a request.
FAILURE_KINDS: Final = {
    Verdict.OLD_EPOCH.value: FailureKind.OTHER_EPOCH,
    Verdict.OTHER_LIST.value: FailureKind.OTHER_EPOCH,
    Verdict.OTHER_NODE.value: FailureKind.WRONG_NODE,
    Verdict.OTHER_CLUSTER.value: FailureKind.WRONG_NODE,
    Verdict.OTHER_INCARNATION.value: FailureKind.WRONG_NODE,
    Verdict.OTHER_PROTOCOL.value: FailureKind.REFUSED,
    Verdict.NOT_A_MEMBER.value: FailureKind.REFUSED,
    Verdict.UNPROVEN.value: FailureKind.REFUSED,
}
# Verdicts that an administrator has to act on: they are logged.
LOGGED_VERDICTS: Final = (
    Verdict.OTHER_LIST, Verdict.OTHER_NODE, Verdict.OTHER_CLUSTER, Verdict.OTHER_PROTOCOL, Verdict.NOT_A_MEMBER,
    Verdict.UNPROVEN,
)  # fmt: skip


def finish_block(block: PendingBlock, outcome: BlockOutcome, now: float, errors: ErrorLog) -> bool:
    """Answer the requester, and count the outcome. Return whether to ask the peer again after wrong bytes."""
    peer = block.peer
    counters = peer.counters
    if isinstance(outcome, PeerBlock):
        counters.blocks += 1
        counters.bytes += block.request.length
        counters.seconds += now - block.requested_at
        peer.recent_seconds.append(now - block.requested_at)
        peer.health.note_block()
        block.finish(outcome)
    elif isinstance(outcome, WrongBytes):
        return _handle_wrong_bytes(block, outcome, now, errors)
    elif outcome.status == protocol.BLOCK_NOT_FOUND:
        counters.not_here += 1
        block.finish(SNAPSHOT_NOT_FOUND if outcome.text == protocol.SNAPSHOT_NOT_FOUND else BLOCK_NOT_FOUND)
    elif outcome.status == protocol.FETCH_YOURSELF:
        counters.delegated += 1
        block.finish(FETCH_YOURSELF)
    elif outcome.status == protocol.OVERLOADED:
        counters.busy += 1
        peer.health.note_busy(now)
        block.finish(PEER_OVERLOADED)
    else:
        counters.failures += 1
        block.finish(PeerRequestFailed(f"node {peer.record.name}: {outcome.text}"))
    return False


def _handle_wrong_bytes(block: PendingBlock, wrong: WrongBytes, now: float, errors: ErrorLog) -> bool:
    peer = block.peer
    if wrong.moved:
        peer.counters.not_here += 1
        block.finish(BLOCK_NOT_FOUND)
        return False
    peer.counters.wrong += 1
    name, key = peer.record.name, block.request.key.hex()
    if not block.is_check_needed:
        # The peer checks its own copy: if that is damaged, the peer repairs it and answers BLOCK_NOT_FOUND.
        errors.add(f"node {name}", f"node {name} sent wrong bytes for block {key}; asking it to verify its copy")
        block.is_check_needed, block.batch = True, None
        return True
    text = f"node {name} sent wrong bytes for block {key} twice; it gets no request for this block for a minute"
    errors.add(f"node {name}", text)
    peer.note_wrong(block.request.key, now)
    block.finish(PeerRequestFailed(text, FailureKind.WRONG_BYTES))
    return False
