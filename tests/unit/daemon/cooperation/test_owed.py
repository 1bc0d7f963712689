"""What a node lets go of when others count, and when."""

import numpy as np
import pytest
from cachefs_daemon.cooperation import owed as module
from cachefs_daemon.cooperation.holders import Former
from cachefs_daemon.cooperation.owed import Owed

from cachefs.planning.cluster.standing import Standing
from tests import virtual_time

FORMER = Former(
    ("me", "other"), np.array([0, 0, 0, 1, 1, 0], np.uint16), 0.0, (np.array([1, 1, 1, 0, 1, 1], np.uint16),)
)


def mine(*blocks: int) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    made = np.zeros(6, np.bool_)
    made[list(blocks)] = True
    return made


def test_what_was_kept_here_is_let_go_when_its_keeper_has_it_and_at_last_when_all_have_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)

    async def run() -> None:
        standing, is_filled = Standing(), False
        owed = Owed("space", "me", standing, lambda: is_filled)

        def kept() -> list[int]:
            return np.flatnonzero(standing.mine["space"]).tolist()

        owed.stand(mine(0, 1, 2, 3, 5))
        owed.note(FORMER)
        owed.stand(mine(0, 4))
        assert kept() == [0, 1, 2, 3, 4, 5]
        assert np.flatnonzero(standing.owed["space"]).tolist() == [1, 2, 3, 5]
        owed.given(np.array([1, 4], np.int32), lambda ids: np.zeros(len(ids), np.bool_))
        assert kept() == [0, 1, 2, 3, 4, 5], "a reader has it, and not who keeps it"
        owed.given(np.array([1, 4], np.int32), lambda ids: np.ones(len(ids), np.bool_))
        assert kept() == [0, 2, 3, 4, 5]
        # Members change again, before all is given.
        owed.note(Former(("me", "other"), np.array([0, 1, 1, 1, 0, 1], np.uint16), 0.0))
        owed.stand(mine())
        assert kept() == [0, 2, 3, 4, 5]
        owed.look()
        assert kept() == [0, 2, 3, 4, 5]
        is_filled = True
        owed.look()
        assert kept() == []
        assert not standing.owed
        owed.note(Former(("other",), np.zeros(6, np.uint16), 0.0))
        owed.stand(mine(2))
        assert kept() == [2], "it was no member"

    virtual_time.run(run())
