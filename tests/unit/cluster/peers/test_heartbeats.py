"""Signs of life of a daemon, and which connection of a node they are sent on."""

import queue

from cachefs_cluster.peers.daemon_fetch_client import FetchOutcomes
from cachefs_cluster.peers.heartbeats import ALIVE_SECONDS, RETRY_SECONDS, Heartbeats


def test_one_connection_of_each_node_sends_them_and_another_is_woken_when_it_ends() -> None:
    signs = Heartbeats(lambda: None)
    first, second, other = (FetchOutcomes() for _ in range(3))
    for node, coming in (("a", first), ("a", second), ("b", other)):
        signs.add_waiter(node, coming)
    assert signs.is_sender("a", first)
    assert not signs.is_sender("a", second)
    assert signs.is_sender("b", other)
    signs.remove_waiter("a", first)
    assert signs.is_sender("a", second)
    assert second.get_nowait() is None
    signs.remove_waiter("a", second)
    signs.remove_waiter("b", other)
    assert all(_is_empty(coming) for coming in (first, second, other))


def test_a_daemon_lives_until_it_leaves_a_question_unanswered() -> None:
    asked: list[int] = []
    signs = Heartbeats(lambda: asked.append(1))
    assert signs.is_daemon_alive(100.0)
    assert len(asked) == 1
    assert signs.is_daemon_alive(100.0 + ALIVE_SECONDS / 2)
    assert not signs.is_daemon_alive(100.0 + 1.1 * ALIVE_SECONDS)
    assert len(asked) == 1, "one question at a time"
    assert not signs.is_daemon_alive(100.0 + RETRY_SECONDS)
    assert len(asked) == 2, "that may have been lost"
    signs.note_message()
    assert signs.is_daemon_alive(100.0 + RETRY_SECONDS + 0.01)
    assert len(asked) == 2, "it has answered a moment ago"
    assert signs.is_daemon_alive(200.0)
    assert len(asked) == 3


def test_a_probe_is_told_whether_the_daemon_answers() -> None:
    signs = Heartbeats(lambda: signs.note_message())
    assert signs.is_daemon_answering()


def _is_empty(coming: FetchOutcomes) -> bool:
    try:
        coming.get_nowait()
    except queue.Empty:
        return True
    return False
