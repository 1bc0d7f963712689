"""When a peer is asked: not while it is dead, and again once a probe gets through."""

from cachefs_cluster.peers.peer import MAX_BUSY_SECONDS, Peer
from cachefs_cluster.peers.rail import FIRST_PAUSE, MAX_PAUSE, Rail, RailHealth
from tests.members import member_record


def test_pauses_between_probes_grow_until_it_gives_answers() -> None:
    peer, now = RailHealth(), 100.0
    assert peer.note_failure("gone", now, 0.0)
    assert not peer.note_failure("gone again", now, 0.0)
    assert (peer.is_out_of_use, peer.reason) == (True, "gone")
    pauses = []
    for _ in range(10):
        pauses.append(peer.probe_at - now)
        now = peer.probe_at
        peer.note_probe(alive=False, now=now, chance=0.0)
    assert pauses == [min(MAX_PAUSE, FIRST_PAUSE * 2**n) for n in range(10)]
    # One that answers probes and nothing else is asked ever less often.
    peer.note_probe(alive=True, now=now, chance=0.0)
    assert not peer.is_out_of_use
    peer.note_failure("gone", now, 0.0)
    assert peer.probe_at - now == MAX_PAUSE
    peer.note_response()
    peer.note_failure("gone", now, 1.0)
    assert peer.probe_at - now == FIRST_PAUSE * 1.25


def test_busy_is_not_dead() -> None:
    peer, now = Peer(member_record(1), [Rail(member_record(1))]), 5.0
    for _ in range(20):
        peer.note_busy(now)
        assert not peer.busy.is_due(now)
        assert not peer.is_out_of_use
        now += MAX_BUSY_SECONDS
        assert peer.busy.is_due(now)
    peer.busy.forget_failures()
    peer.note_busy(now)
    assert peer.busy.is_due(now + 0.05)
