"""The function that all nodes share: facts that must never change."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from cachefs.planning.cluster.rendezvous import (
    RingMember,
    key_hashes,
    mix_bits,
    rank_members,
    scores,
    space_hashes,
    weight_of,
)
from tests.simulated import space_of

SEEDS = {
    "node-a": 0xDADEA24AA12481FE,
    "node-b": 0x69E4375FD7ACDB4C,
    "node-c": 0x5C16AA5E20D50ABF,
    "node-d": 0x6F61AB3F658624E3,
}
WEIGHTS = {"node-a": 1.0, "node-b": 1.0, "node-c": 2.0, "node-d": 0.5}
NODES = [RingMember(name, seed, WEIGHTS[name]) for name, seed in SEEDS.items()]

# Key, its hash, the order of the nodes, and the score of one of them.
VECTORS = [
    ("00" * 20, 0xE220A8397B1DCDAF, "abcd", "a", 7.854481038),
    ("000102030405060708090a0b0c0d0e0f10111213", 0x6336A71EE15F9572, "cadb", "c", 63.499559243),
    ("70960ac244f235437e4384f9f2d4270b00000000", 0x84730E07BA26E315, "cdab", "d", 2.849671459),
    ("70960ac244f235437e4384f9f2d4270b00000000", 0x84730E07BA26E315, "cdab", "a", 2.832222697),
    ("70960ac244f235437e4384f9f2d4270b00000007", 0x3293BF6AFB889BAD, "cabd", "", 0.0),
    ("ff" * 20, 0xD3C3FC2C2DE810EC, "cabd", "", 0.0),
]


def keys(*texts: str) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.frombuffer(bytes.fromhex("".join(texts)), np.uint8).reshape(-1, 20)


def test_the_mixing_function_is_the_one_that_was_agreed_on() -> None:
    assert mix_bits(np.array([1, 0x0123456789ABCDEF], np.uint64)).tolist() == [0x5692161D100B05E5, 0xB2C058E4EBB5112C]


def test_seeds_are_hashes_of_ids() -> None:
    assert {name: xxh3_64_intdigest(name.encode()) for name in SEEDS} == SEEDS


@pytest.mark.parametrize(("key", "expected", "order", "node", "score"), VECTORS)
def test_hash_order_and_score_are_those_that_were_agreed_on(
    key: str, expected: int, order: str, node: str, score: float
) -> None:
    hashes = key_hashes(keys(key))
    assert hashes.tolist() == [expected]
    assert "".join("abcd"[number] for number in rank_members(hashes, NODES)[0]) == order
    if node:
        assert scores(hashes, NODES["abcd".index(node)])[0] == pytest.approx(score, abs=5e-10)


def test_a_space_has_the_hashes_of_its_keys() -> None:
    space = space_of([0, 1, 3 << 20, 5, (1 << 20) + 1])
    raw = b"".join(space.keys(np.arange(space.count)))
    assert (space_hashes(space) == key_hashes(np.frombuffer(raw, np.uint8).reshape(-1, 20))).all()
    assert space_hashes(space_of([])).shape == (0,)


@given(st.integers(1, 1 << 50))
def test_a_weight_is_near_the_capacity_and_does_not_change_with_a_few_blocks(capacity: int) -> None:
    weight = weight_of(capacity)
    assert weight * (1 << 30) == pytest.approx(capacity, rel=0.006)
    assert weight_of(round(weight * (1 << 30))) == weight or capacity < 1000


def test_equal_machines_have_equal_weights() -> None:
    assert weight_of(500 << 30) == weight_of((500 << 30) - (100 << 20))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_is_above_zero(weight: float) -> None:
    with pytest.raises(ValueError, match="a weight is a number above 0"):
        RingMember("node-a", 1, weight)
