"""What one node publishes is what another one has of it, however it is asked for."""

from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from cachefs_cluster.sharing import local_state, remote_state
from cachefs_cluster.sharing.local_state import LocalState
from cachefs_cluster.sharing.remote_state import RemoteState
from cachefs_cluster.sharing.sections import MOUNTED, MountedDataset
from cachefs_cluster.sharing.wire import StateChanges

NAMES = st.sampled_from("abcdefgh")
VALUES = st.none() | st.text("xyz", max_size=40).map(MountedDataset)
CHANGES = st.lists(st.tuples(NAMES, VALUES), max_size=12)
# Changes, and whether the other one has forgotten all before it asks.
STEPS = st.lists(st.tuples(CHANGES, st.booleans()), max_size=12)


def ask(own: LocalState, peer: RemoteState) -> list[Any]:
    page = own.changes_since(peer.version)
    return peer.apply(StateChanges(page.full, page.changes, page.version))


@given(STEPS)
def test_a_peer_has_what_a_node_publishes(steps: list[Any]) -> None:
    own, peer = LocalState(), RemoteState("other")
    heard: dict[str, MountedDataset] = {}  # as whoever listens knows it

    def listen(news: list[Any]) -> None:
        for _, name, value in news:
            assert heard.get(name) != value, "that is no news"
            if value is None:
                del heard[name]
            else:
                heard[name] = value

    with patch.object(local_state, "MAX_REMOVED", 3):
        for changes, forgets in steps:
            for name, value in changes:
                own.set_value("mounted", name, MOUNTED.encode(value) if value is not None else None)
            if forgets:
                listen(peer.clear())
            listen(ask(own, peer))
            assert heard == peer.values("mounted")
        listen(ask(own, peer))
    assert heard == {name: MOUNTED.decode(name, own.get_value("mounted", name) or b"") for name in own.names("mounted")}
    assert own.changes_since(peer.version).changes == []


def test_what_makes_no_sense_is_left_out_and_counted() -> None:
    peer = RemoteState("other")
    good = MOUNTED.encode(MountedDataset("/mnt"))
    changes = [
        ("mounted", "good", good),
        ("mounted", "../../etc", good),
        ("mounted", "data", b"\xc1"),
        ("mounted", "data", MOUNTED.encode(MountedDataset("\x1b[2J"))),
        ("mounted", "data", b"x" * (MOUNTED.max_bytes + 1)),
        ("of a later release", "data", b"anything"),
    ]
    news = peer.apply(StateChanges(False, changes, 9))
    assert news == [("mounted", "good", MountedDataset("/mnt"))]
    assert dict(peer.values("mounted")) == {"good": MountedDataset("/mnt")}
    assert peer.rejected_count == 4


def test_nobody_fills_the_memory_of_others() -> None:
    value = MOUNTED.encode(MountedDataset("/" + "m" * 4000))
    peer = RemoteState("other")
    peer.apply(StateChanges(True, [("mounted", f"d{number}", value) for number in range(MOUNTED.max_values + 100)], 2))
    assert len(peer.values("mounted")) <= MOUNTED.max_values
    with patch.object(remote_state, "MAX_NODE_BYTES", 10 * len(value)):
        peer = RemoteState("other")
        peer.apply(StateChanges(True, [("mounted", f"d{number}", value) for number in range(100)], 2))
        assert len(peer.values("mounted")) < 11
        # What it says in place of something else has that one's room.
        peer.apply(StateChanges(False, [("mounted", "d0", value)], 3))
        assert "d0" in peer.values("mounted")


def test_a_removed_value_that_is_removed_again_is_no_news() -> None:
    own = LocalState()
    assert not own.set_value("mounted", "data", None)
    assert own.set_value("mounted", "data", b"1")
    assert not own.set_value("mounted", "data", b"1")
    assert own.set_value("mounted", "data", None)
    assert not own.set_value("mounted", "data", None)
