"""Which blocks are a node's by their homes, and who else may have them: as `Homes` has it, in parts or as a whole."""

import numpy as np
import pytest

from cachefs.planning.cluster import at_home as module
from cachefs.planning.cluster.at_home import at_home, may_have
from cachefs.planning.cluster.homes import NO_NODE, Homes
from cachefs.planning.cluster.rendezvous import Member, mix

BLOCKS = 1000
HASHES = mix(np.arange(1, BLOCKS + 1, dtype=np.uint64))
MEMBERS = [Member(f"{number:02}", 977 * number + 1, 1.0 + number % 2, "xy"[number % 2]) for number in range(5)]


@pytest.fixture(autouse=True, params=[1 << 20, 64])
def in_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", request.param)


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_is_at_home_on_a_node(replicas: int) -> None:
    homes = Homes(HASHES, replicas)
    homes.set_members(MEMBERS)
    for number, member in enumerate(MEMBERS):
        expected = (homes.first == number) | (homes.second == number)
        assert (at_home(HASHES, MEMBERS, member.id, replicas) == expected).all()
    assert not at_home(HASHES, MEMBERS, "a stranger", replicas).any()


@pytest.mark.parametrize("replicas", [1, 2])
def test_who_may_have_them(replicas: int) -> None:
    rings = (MEMBERS[:3], [], MEMBERS, [MEMBERS[4], MEMBERS[0]])
    found = may_have(HASHES, rings, replicas)
    assert len(found) == 3 * replicas
    for place, ring in enumerate(ring for ring in rings if ring):
        homes = Homes(HASHES, replicas)
        homes.set_members(ring)
        for one, expected in zip(found[place * replicas :], (homes.first, homes.second)[:replicas], strict=False):
            assert one.ids == tuple(sorted(member.id for member in ring))
            assert (one.nodes == expected).all()
    one = found[0]
    some = np.array([3, 1, 4])
    assert (one.part(some).nodes == one.nodes[some]).all()
    assert (one.among({one.ids[1]}) == (one.nodes == 1)).all()
    assert not module.MayHave(("a",), np.full(4, NO_NODE, np.uint16)).among({"a"}).any()
