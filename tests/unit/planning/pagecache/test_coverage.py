"""What the page cache has, memory gives up first, and does not get back."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from cachefs.block import MEMORY, SSD
from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.eviction.policies.clairvoyant import Clairvoyant
from cachefs.planning.pagecache.push_lookahead import PushReader, all_tripwires
from cachefs.planning.pagecache.states import COMING, HELD, OUT, Coverage, MemoryCoverage
from cachefs.planning.sequences.plan import Plan
from cachefs_daemon.store.storage import StoreConfig
from tests.blockstore import (
    BLOCK_SIZE,
    OpenStore,
    data_of,
    fill,
    key_of,
    memory_directory,
    opened,
    readable,
    store_config,
)
from tests.simulated import space_of

COUNT = 200
IDS = np.arange(COUNT, dtype=np.int32)


@dataclass(frozen=True)
class Mount:
    states: dict[str, npt.NDArray[np.uint8]]


def having(*held: int, snapshot: str = "space") -> Mount:
    made = np.full(COUNT, OUT, np.uint8)
    made[list(held)] = HELD
    return Mount({snapshot: made})


@pytest.fixture(params=["clairvoyant", "alsd"])
def store(request: pytest.FixtureRequest) -> Iterator[OpenStore]:
    """Block *n* is key_of(n), and is the n-th to be read; 38 or so fit into memory."""
    contents = np.frombuffer(b"".join(key_of(number)[:16] for number in IDS), [("high", "<u8"), ("low", "<u8")])
    with memory_directory() as root, opened(_config(root, request.param)) as made:
        made.plan.add_space(BlockSpace("space", BLOCK_SIZE, np.full(COUNT, 100_000, np.int64), contents))
        made.plan.set_epoch("job", "space", 0, IDS, is_last=True)
        yield made


def _config(root: Path, policy: str) -> StoreConfig:
    return store_config(root, memory=4 << 20, ssd=64 << 20, policy=policy)


def in_memory(store: OpenStore) -> set[int]:
    located = {number: store.get(key_of(number)) for number in range(COUNT)}
    return {number for number, location in located.items() if location is not None and location.tier == MEMORY}


def test_what_is_held_makes_room_for_what_is_read_later(store: OpenStore) -> None:
    fill(store, range(30))
    store.coverage.set_mounts([having(*range(20))], {})
    fill(store, range(100, 118))
    kept = in_memory(store)
    assert kept >= {*range(20, 30), *range(100, 118)}
    still_held = kept & set(range(20))
    assert still_held == set(range(len(still_held))), "what is read last goes first among what is held"
    assert len(still_held) < 20
    assert readable(store, range(20)) == set(range(20)), "the SSD tier has it now"


def test_what_is_held_is_not_promoted_even_into_free_room(store: OpenStore) -> None:
    fill(store, range(60))
    on_ssd = sorted(set(range(60)) - in_memory(store))
    store.evict([key_of(number) for number in in_memory(store)])
    store.coverage.set_mounts([having(*on_ssd[:3])], {})
    assert store.promote([key_of(number) for number in on_ssd[:6]]) == 3
    assert in_memory(store) == set(on_ssd[3:6])


def test_what_is_held_displaces_nothing_but_goes_to_the_ssd(store: OpenStore) -> None:
    fill(store, range(50, 90))
    before = in_memory(store)
    store.coverage.set_mounts([having(*range(10))], {})
    for number in range(10):
        location = store.put(key_of(number), data_of(number), transient=False)
        assert location is not None
        assert location.tier == SSD
    assert in_memory(store) == before


def test_only_what_every_mount_has_and_keeps_is_held() -> None:
    cached = Coverage(Plan())
    assert not cached.are_covered("space", IDS).any()
    first, second = having(1, 2, 3, 4), having(2, 3, 4, 5)
    first.states["space"][6] = COMING
    leaving = np.zeros(COUNT, np.bool_)
    leaving[3] = True
    cached.set_mounts([first, second, having(snapshot="other")], {"space": leaving})
    assert np.flatnonzero(cached.are_covered("space", IDS)).tolist() == [2, 4]
    first.states["space"][4] = OUT
    assert MemoryCoverage(cached, lambda: 1.0).raise_scores("space", IDS, np.zeros(COUNT)).nonzero()[0].tolist() == [2]
    assert not cached.are_covered("unknown", IDS).any()


@pytest.mark.parametrize("policy", ["clairvoyant", "alsd"])
def test_what_is_held_stays_in_memory_where_no_tier_below_keeps_it(policy: str) -> None:
    """Page caches promise nothing: with a memory tier alone, its copy is the only one that lasts."""
    contents = np.frombuffer(b"".join(key_of(number)[:16] for number in IDS), [("high", "<u8"), ("low", "<u8")])
    with memory_directory() as root, opened(store_config(root, memory=4 << 20, ssd=0, policy=policy)) as store:
        store.plan.add_space(BlockSpace("space", BLOCK_SIZE, np.full(COUNT, 100_000, np.int64), contents))
        store.plan.set_epoch("job", "space", 0, IDS, is_last=True)
        fill(store, range(30))
        store.coverage.set_mounts([having(*range(20))], {})
        fill(store, range(100, 118))
        assert readable(store, range(30)) == set(range(30))


@pytest.mark.parametrize(
    ("kept_below", "victims"),
    [(0.1705, [170, 169, 168]), (0.1515, [151, 150, 199]), (0.1, [199, 198, 197]), (np.inf, [179, 178, 177])],
)
def test_what_is_held_leaves_memory_only_where_the_tier_below_keeps_it(kept_below: float, victims: list[int]) -> None:
    """Per block, and not per configuration: a full SSD tier takes what is read sooner than what it has."""
    plan, space = Plan(), space_of([100] * COUNT)
    plan.add_space(space)
    plan.set_epoch("job", "space", 0, IDS, is_last=True)  # block n is read in n milliseconds
    coverage = Coverage(plan)
    coverage.set_mounts([having(*range(150, 180))], {})
    policy, keys = Clairvoyant(plan, MemoryCoverage(coverage, lambda: kept_below)), space.keys(IDS)
    for number in range(140, COUNT):
        policy.note_added(keys[number], 100)
    assert policy.choose_victims(300, (), [keys[0]]) == [keys[number] for number in victims]


def test_tripwires_of_this_epoch_and_the_next_are_leaving() -> None:
    plan = Plan()
    plan.add_space(space_of([100] * COUNT, "space"))
    plan.set_epoch("c", "space", 0, IDS)
    plan.set_epoch("c", "space", 1, IDS[::-1].copy(), is_last=True)
    wires = all_tripwires(plan, [PushReader("c", "space", 0, 0, 8)])["space"]
    assert np.flatnonzero(wires).tolist() == sorted({*range(7, COUNT, 8), *range(COUNT - 8, -1, -8)})
    assert not all_tripwires(plan, [PushReader("c", "space", 0, 0, 0)])["space"].any()
