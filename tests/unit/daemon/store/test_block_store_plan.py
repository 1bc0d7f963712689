"""The block store with a plan: what it keeps, moves between tiers, and says is there."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cachefs.block import MEMORY, SSD
from cachefs.planning.blocks.presence import ABSENT, IN_MEMORY, IN_SSD
from cachefs.planning.blocks.space import BlockSpace
from cachefs_daemon.store.segment_writer import span
from tests.blockstore import (
    BLOCK_SIZE,
    OpenStore,
    data_of,
    fill,
    key_of,
    opened,
    readable,
    store_config,
)

SIZE = 100_000
BLOCKS = 400


def space() -> BlockSpace:
    """In which block *n* is key_of(n)."""
    contents = np.frombuffer(
        b"".join(key_of(number)[:16] for number in range(BLOCKS)), [("high", "<u8"), ("low", "<u8")]
    )
    return BlockSpace("space", BLOCK_SIZE, np.full(BLOCKS, SIZE, np.int64), contents)


@pytest.fixture
def store(root: Path) -> Iterator[OpenStore]:
    with opened(store_config(root, memory=4 << 20, ssd=0, policy="clairvoyant")) as store:
        yield store


@pytest.fixture
def tiered(root: Path) -> Iterator[OpenStore]:
    with opened(store_config(root, memory=4 << 20, ssd=6 << 20, policy="clairvoyant")) as store:
        yield store


def plan(store: OpenStore, order: list[int], following: list[int] | None = None) -> None:
    if "space" not in store.plan.spaces:
        store.plan.add_space(space())
    store.plan.set_epoch("job", "space", 0, np.array(order), is_last=following is None)
    if following is not None:
        store.plan.set_epoch("job", "space", 1, np.array(following), is_last=True)


def tier_of(store: OpenStore, number: int) -> int | None:
    location = store.get(key_of(number))
    return location.tier if location is not None else None


def kept_without_plan(store: OpenStore) -> int:
    """Blocks that fit beside the room of passing ones."""
    return (store.usage()[0].limit - 4 * span(BLOCK_SIZE)) // span(SIZE)


def test_only_what_is_read_sooner_displaces_anything(store: OpenStore) -> None:
    plan(store, list(range(BLOCKS)))
    for number in range(100, 160):
        store.put(key_of(number), data_of(number), transient=False)
    before = readable(store, range(BLOCKS))
    assert len(before) < 60, "the tier must be full"
    assert store.put(key_of(300), data_of(300), transient=False) is None
    assert readable(store, range(BLOCKS)) == before
    assert store.room_for(key_of(300)) < SIZE
    assert store.room_for(key_of(0)) > 20 * SIZE
    assert store.put(key_of(0), data_of(0), transient=False) is not None
    assert readable(store, range(BLOCKS)) >= {0, *range(100, 130)}


def test_without_plan_what_came_first_stays_and_passing_blocks_have_their_room(store: OpenStore) -> None:
    fill(store, range(200))
    first = set(range(kept_without_plan(store)))
    assert readable(store, range(200)) >= first
    fill(store, range(200, 300))
    assert readable(store, range(200)) == first


def test_a_published_plan_takes_all_room_and_gives_it_back(store: OpenStore) -> None:
    fill(store, range(300, BLOCKS))
    plan(store, list(range(BLOCKS)))
    for number in range(40):
        store.put(key_of(number), data_of(number), transient=False)
    planned = readable(store, range(40))
    assert len(planned) == store.usage()[0].limit // span(SIZE)
    assert not readable(store, range(300, BLOCKS))
    store.plan.remove_consumer("job")
    fill(store, range(300, BLOCKS))
    kept = readable(store, range(40))
    assert len(kept) >= kept_without_plan(store) - 1
    fill(store, range(200, 300))
    assert readable(store, range(40)) == kept


def test_readers_of_unplanned_blocks_pass_through_without_displacing_each_other_at_once(store: OpenStore) -> None:
    plan(store, list(range(50)))
    for number in range(50):
        store.put(key_of(number), data_of(number), transient=False)
    planned = len(readable(store, range(50)))
    fill(store, range(200, 300))
    assert len(readable(store, range(200, 300))) >= 4
    assert len(readable(store, range(50))) >= planned - 6
    assert readable(store, range(297, 300)) == {297, 298, 299}


def test_what_memory_gives_up_goes_to_the_ssd_and_is_promoted_when_it_is_near(tiered: OpenStore) -> None:
    plan(tiered, list(range(BLOCKS)))
    fill(tiered, range(10, 70))
    assert tier_of(tiered, 10) == MEMORY
    assert tier_of(tiered, 69) == SSD
    near = [number for number in range(10, 70) if tier_of(tiered, number) == SSD][:5]
    tiered.plan.set_progress("job", 0, near[0])
    assert tiered.promote([key_of(number) for number in near]) == 5
    assert {tier_of(tiered, number) for number in near} == {MEMORY}
    assert readable(tiered, range(10, 70)) >= {*near, *range(20, 50)}
    assert tiered.promote([key_of(number) for number in [*near, 399]]) == 0
    furthest = max(number for number in range(10, 70) if tier_of(tiered, number) == SSD)
    assert tiered.promote([key_of(furthest)]) <= 1
    assert tiered.promote([]) == 0


def test_promotion_does_not_displace_what_is_nearer(tiered: OpenStore) -> None:
    plan(tiered, list(range(BLOCKS)))
    fill(tiered, range(10, 90))
    far = max(number for number in range(10, 90) if tier_of(tiered, number) == SSD)
    memory = {number for number in range(10, 90) if tier_of(tiered, number) == MEMORY}
    assert tiered.promote([key_of(far)]) == 0
    assert {number for number in range(10, 90) if tier_of(tiered, number) == MEMORY} == memory


def test_promotion_keeps_budgets_and_bytes(tiered: OpenStore) -> None:
    draw = np.random.default_rng(3)
    plan(tiered, draw.permutation(BLOCKS).tolist(), draw.permutation(BLOCKS).tolist())
    fill(tiered, range(90))
    for position in range(0, BLOCKS, 20):
        tiered.plan.set_progress("job", 0, position)
        tiered.promote(key_of(number) for number in draw.permutation(90)[:10].tolist())
        readable(tiered, range(90))
        for usage in tiered.usage():
            assert usage.used <= usage.limit
    located = [tier_of(tiered, number) for number in range(90)]
    assert [usage.blocks for usage in tiered.usage()] == [located.count(MEMORY), located.count(SSD)]


def test_who_watches_sees_what_is_there_and_what_changes(tiered: OpenStore) -> None:
    fill(tiered, range(50))
    tiered.watch(space())
    states = tiered.presence.states["space"]

    def expected() -> list[int]:
        names = {None: ABSENT, MEMORY: IN_MEMORY, SSD: IN_SSD}
        return [names[tier_of(tiered, number)] for number in range(BLOCKS)]

    assert states.tolist() == expected()
    assert set(states.tolist()) == {ABSENT, IN_MEMORY, IN_SSD}
    plan(tiered, list(range(BLOCKS))[::-1])
    fill(tiered, range(350, BLOCKS))
    assert states.tolist() == expected()
    tiered.evict([key_of(number) for number in range(380, 390)])
    tiered.promote([key_of(number) for number in range(BLOCKS)][::-1])
    assert states.tolist() == expected()
    tiered.unwatch("space")
    assert "space" not in tiered.presence.states


def test_pinned_blocks_outlast_any_plan(store: OpenStore) -> None:
    plan(store, list(range(BLOCKS)))
    store.pin([key_of(390)])
    store.put(key_of(390), data_of(390))
    for number in range(100):
        store.put(key_of(number), data_of(number), transient=False)
    assert readable(store, range(BLOCKS)) >= {390, 0, 20}


def test_a_copy_that_becomes_this_nodes_to_keep_stays(root: Path) -> None:
    """Another node lets go of it then: where it were displaced all the same, the cluster would have none of it."""
    with contextlib.closing(
        OpenStore(store_config(root, memory=4 << 20, ssd=0, policy="clairvoyant"), in_cluster=True)
    ) as store:
        plan(store, list(range(BLOCKS)))
        assert store.standing is not None
        mine = np.arange(BLOCKS) >= 100
        store.standing.set_owned("space", mine)
        for number in range(100, 160):
            store.put(key_of(number), data_of(number), transient=False)
        assert store.put(key_of(50), data_of(50), transient=False) is None, "it would displace what only this node has"
        for adopted, left in ((False, set()), (True, {50})):
            fill(store, [50])
            if adopted:
                store.standing.update_owned("space", np.array([50], np.int32), True)
                with store.tiering as tiering:
                    tiering.adopt_blocks([key_of(50), key_of(51), key_of(100)])  # of the others one is not here
            fill(store, range(200, 300))
            assert readable(store, [50]) == left
