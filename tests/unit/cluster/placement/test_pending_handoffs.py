"""What a node lets go of when others count, and when."""

import numpy as np
import pytest

from cachefs.planning.cluster.ownership import Ownership
from cachefs_cluster.placement import pending_handoffs as module
from cachefs_cluster.placement.holders import FormerHolders
from cachefs_cluster.placement.pending_handoffs import PendingHandoffs
from tests import virtual_time

FORMER = FormerHolders(
    ("me", "other"), np.array([0, 0, 0, 1, 1, 0], np.uint16), 0.0, (np.array([1, 1, 1, 0, 1, 1], np.uint16),)
)


def mine(*blocks: int) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    made = np.zeros(6, np.bool_)
    made[list(blocks)] = True
    return made


def test_what_was_kept_here_is_let_go_when_its_keeper_has_it_and_at_last_when_all_have_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.0)

    async def run() -> None:
        standing, is_filled = Ownership(), False
        owed = PendingHandoffs("space", "me", standing, lambda: is_filled)

        def kept() -> list[int]:
            return np.flatnonzero(standing.owned["space"]).tolist()

        owed.set_kept(mine(0, 1, 2, 3, 5))
        owed.add_handoffs(FORMER)
        owed.set_kept(mine(0, 4))
        assert kept() == [0, 1, 2, 3, 4, 5]
        assert np.flatnonzero(standing.pending_handoffs["space"]).tolist() == [1, 2, 3, 5]
        owed.release_blocks(np.array([1, 4], np.int32), lambda ids: np.zeros(len(ids), np.bool_))
        assert kept() == [0, 1, 2, 3, 4, 5], "a reader has it, and not who keeps it"
        owed.release_blocks(np.array([1, 4], np.int32), lambda ids: np.ones(len(ids), np.bool_))
        assert kept() == [0, 2, 3, 4, 5]
        # Members change again, before all is given.
        owed.add_handoffs(FormerHolders(("me", "other"), np.array([0, 1, 1, 1, 0, 1], np.uint16), 0.0))
        owed.set_kept(mine())
        assert kept() == [0, 2, 3, 4, 5]
        owed.expire()
        assert kept() == [0, 2, 3, 4, 5]
        is_filled = True
        owed.expire()
        assert kept() == []
        assert not standing.pending_handoffs
        owed.add_handoffs(FormerHolders(("other",), np.zeros(6, np.uint16), 0.0))
        owed.set_kept(mine(2))
        assert kept() == [2], "it was no member"

    virtual_time.run(run())
