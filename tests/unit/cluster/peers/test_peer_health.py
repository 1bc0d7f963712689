"""When a peer is asked: not while it is dead, and again once a probe gets through."""

from cachefs_cluster.peers.peer import FIRST_PAUSE, MAX_BUSY_SECONDS, MAX_PAUSE, PeerHealth


def test_pauses_between_probes_grow_until_it_gives_answers() -> None:
    peer, now = PeerHealth(), 100.0
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
    peer, now = PeerHealth(), 5.0
    for _ in range(20):
        peer.note_busy(now)
        assert peer.is_busy(now)
        assert not peer.is_out_of_use
        now += MAX_BUSY_SECONDS
        assert not peer.is_busy(now)
    peer.note_block()
    peer.note_busy(now)
    assert not peer.is_busy(now + 0.05)
