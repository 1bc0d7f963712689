"""What is here of each snapshot, for several who ask."""

import numpy as np
import pytest

from cachefs.planning.blocks.presence import IN_MEMORY, IN_SSD, WHOLE, Presence
from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.sequences.plan import Plan
from cachefs_daemon.reporting import residency
from cachefs_daemon.reporting.residency import Residency
from tests.simulated import space_of


class Index:
    """Which block is in which tier."""

    def __init__(self) -> None:
        self.states: dict[bytes, int] = {}

    def commit(self) -> None:
        """Nothing is waiting."""

    def keys_with_tiers(self, _: int) -> list[tuple[list[bytes], bytes]]:
        return [(list(self.states), bytes(state - 1 for state in self.states.values()))] if self.states else []


class Quotas:
    """Says for which snapshots blocks came."""

    def __init__(self) -> None:
        self.fetched_snapshots: set[str] = set()


class Tiering:
    """A lock that is free."""

    def __init__(self) -> None:
        self.quotas = Quotas()

    def __enter__(self) -> "Tiering":
        return self

    def __exit__(self, *_: object) -> None:
        """It was nobody's."""


class Snapshot:
    """So much of one as is asked for."""

    def __init__(self, name: str, files: int) -> None:
        self.id, self.files = name, files


class Node:
    """Two snapshots, s and t, with four blocks each."""

    def __init__(self) -> None:
        self.spaces: dict[str, BlockSpace] = {name: space_of([100] * 4, name) for name in ("s", "t")}
        self.plan, self.presence, self.tiering, self.index = Plan(), Presence(), Tiering(), Index()
        for space in self.spaces.values():
            self.plan.add_space(space)
        self.counted = Residency(self.index, self.tiering, self.presence, self.plan)  # type: ignore[arg-type]

    def follow(self, who: str, *names: str) -> set[str]:
        return self.counted.count_changes(who, {name: Snapshot(name, 4) for name in names})  # type: ignore[misc]

    def bring(self, name: str, number: int, state: int) -> None:
        [key] = self.spaces[name].keys(np.array([number]))
        self.presence.set_state(key, state)
        self.index.states[key] = state
        self.tiering.quotas.fetched_snapshots.add(name)

    def parts(self, name: str, state: int) -> list[int]:
        found = self.counted.counts_of(name)
        assert found is not None
        return found.shard_parts_in(state)[::64].tolist()


def test_each_hears_of_what_has_changed_since_it_asked() -> None:
    node = Node()
    assert node.follow("observers", "s", "t") == set()
    node.follow("web", "s")
    node.bring("s", 0, IN_MEMORY)
    node.bring("s", 3, IN_SSD)
    assert node.counted.counts_of("s") is None, "nobody has counted"
    assert node.follow("web", "s") == {"s"}
    assert node.parts("s", IN_MEMORY) == [WHOLE, 0, 0, 0]
    assert node.parts("s", IN_SSD) == [0, 0, 0, WHOLE]
    assert node.follow("web", "s") == set()
    assert node.follow("observers", "s", "t") == {"s"}, "it was told to the other one only"
    node.bring("t", 1, IN_MEMORY)
    node.follow("web", "s")
    assert "t" in node.follow("observers", "s", "t"), "what one does not ask for is followed for the other"


def test_while_nobody_asks_nothing_is_noted() -> None:
    node = Node()
    node.follow("web", "s")
    node.follow("observers", "t")
    node.counted.forget("web")
    assert node.presence.changes is not None
    node.counted.forget("observers")
    assert node.presence.changes is None
    node.bring("s", 0, IN_MEMORY)
    assert node.follow("web", "s") == {"s"}, "the index is looked through anew"


def test_a_snapshot_may_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "MAX_BLOCKS", 3)
    node = Node()
    node.plan = node.counted._plan = Plan()
    node.follow("web", "s")
    assert node.counted.is_too_large("s")
    assert node.counted.counts_of("s") is None
