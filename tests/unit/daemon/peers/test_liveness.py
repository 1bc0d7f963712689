"""When a peer is asked: not while it is dead, and again once a probe gets through."""

from cachefs_daemon.peers.liveness import FIRST_PAUSE, LONGEST_BUSY, LONGEST_PAUSE, Liveness


def test_pauses_between_probes_grow_until_it_gives_answers() -> None:
    peer, now = Liveness(), 100.0
    assert peer.failed("gone", now, 0.0)
    assert not peer.failed("gone again", now, 0.0)
    assert (peer.cooling, peer.reason) == (True, "gone")
    pauses = []
    for _ in range(10):
        pauses.append(peer.probe_at - now)
        now = peer.probe_at
        peer.probed(alive=False, now=now, chance=0.0)
    assert pauses == [min(LONGEST_PAUSE, FIRST_PAUSE * 2**n) for n in range(10)]
    # One that answers probes and nothing else is asked ever less often.
    peer.probed(alive=True, now=now, chance=0.0)
    assert not peer.cooling
    peer.failed("gone", now, 0.0)
    assert peer.probe_at - now == LONGEST_PAUSE
    peer.served()
    peer.failed("gone", now, 1.0)
    assert peer.probe_at - now == FIRST_PAUSE * 1.25


def test_busy_is_not_dead() -> None:
    peer, now = Liveness(), 5.0
    for _ in range(20):
        peer.busy(now)
        assert peer.is_busy(now)
        assert not peer.cooling
        now += LONGEST_BUSY
        assert not peer.is_busy(now)
    peer.gave()
    peer.busy(now)
    assert not peer.is_busy(now + 0.05)
