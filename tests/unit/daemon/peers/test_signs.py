"""Signs of life of a daemon, and which connection of a node they are sent on."""

import queue

from cachefs_daemon.peers.daemon_fetches import Coming
from cachefs_daemon.peers.signs import AGAIN_SECONDS, LIVES_SECONDS, Signs


def test_one_connection_of_each_node_sends_them_and_another_is_woken_when_it_ends() -> None:
    signs = Signs(lambda: None)
    first, second, other = (Coming() for _ in range(3))
    for node, coming in (("a", first), ("a", second), ("b", other)):
        signs.enter(node, coming)
    assert signs.speaks("a", first)
    assert not signs.speaks("a", second)
    assert signs.speaks("b", other)
    signs.leave("a", first)
    assert signs.speaks("a", second)
    assert second.get_nowait() is None
    signs.leave("a", second)
    signs.leave("b", other)
    assert all(_is_empty(coming) for coming in (first, second, other))


def test_a_daemon_lives_until_it_leaves_a_question_unanswered() -> None:
    asked: list[int] = []
    signs = Signs(lambda: asked.append(1))
    assert signs.lives(100.0)
    assert len(asked) == 1
    assert signs.lives(100.0 + LIVES_SECONDS / 2)
    assert not signs.lives(100.0 + 1.1 * LIVES_SECONDS)
    assert len(asked) == 1, "one question at a time"
    assert not signs.lives(100.0 + AGAIN_SECONDS)
    assert len(asked) == 2, "that may have been lost"
    signs.heard()
    assert signs.lives(100.0 + AGAIN_SECONDS + 0.01)
    assert len(asked) == 2, "it has answered a moment ago"
    assert signs.lives(200.0)
    assert len(asked) == 3


def test_a_probe_is_told_whether_the_daemon_answers() -> None:
    signs = Signs(lambda: signs.heard())
    assert signs.answers()


def _is_empty(coming: Coming) -> bool:
    try:
        coming.get_nowait()
    except queue.Empty:
        return True
    return False
