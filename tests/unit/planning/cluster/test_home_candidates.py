"""Which blocks are a node's by their homes, and who else may have them: as `BlockHomes` has it, in parts or as a
whole."""

import numpy as np
import pytest

from cachefs.planning.cluster import homes as module
from cachefs.planning.cluster.homes import NO_NODE, BlockHomes, blocks_at_home, candidate_nodes
from cachefs.planning.cluster.rendezvous import RingMember, mix_bits

BLOCKS = 1000
HASHES = mix_bits(np.arange(1, BLOCKS + 1, dtype=np.uint64))
MEMBERS = [RingMember(f"{number:02}", 977 * number + 1, 1.0 + number % 2, "xy"[number % 2]) for number in range(5)]


@pytest.fixture(autouse=True, params=[1 << 20, 64])
def in_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCKS_PER_PART", request.param)


def test_what_is_at_home_on_a_node() -> None:
    homes = BlockHomes(HASHES)
    homes.set_members(MEMBERS)
    for number, member in enumerate(MEMBERS):
        assert (blocks_at_home(HASHES, MEMBERS, member.id) == (homes.first == number)).all()
    assert not blocks_at_home(HASHES, MEMBERS, "a stranger").any()


@pytest.mark.parametrize("replicas", [1, 2])
def test_who_may_have_them(replicas: int) -> None:
    rings = (MEMBERS[:3], [], MEMBERS, [MEMBERS[4], MEMBERS[0]])
    found = candidate_nodes(HASHES, rings, replicas)
    assert len(found) == 3 * replicas
    for place, ring in enumerate(ring for ring in rings if ring):
        homes = BlockHomes(HASHES, replicas)
        homes.set_members(ring)
        for one, expected in zip(found[place * replicas :], (homes.first, homes.second)[:replicas], strict=False):
            assert one.ids == tuple(sorted(member.id for member in ring))
            assert (one.nodes == expected).all()
    one = found[0]
    some = np.array([3, 1, 4])
    assert (one.select(some).nodes == one.nodes[some]).all()
    assert (one.are_among({one.ids[1]}) == (one.nodes == 1)).all()
    assert not module.NodeCandidates(("a",), np.full(4, NO_NODE, np.uint16)).are_among({"a"}).any()
