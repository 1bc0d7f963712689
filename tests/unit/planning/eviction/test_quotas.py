"""What datasets may take: whose block is whose, who gives way, what expires; and the store that keeps to it."""

import math
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cachefs.block import MEMORY, SSD
from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.eviction.policies import make_policy
from cachefs.planning.eviction.quotas import Quota, Quotas
from cachefs.planning.sequences.plan import Plan
from cachefs_daemon.store.segment_writer import span
from tests.blockstore import BLOCK_SIZE, OpenStore, data_of, key_of, opened, store_config

SIZE = 100_000
CAPACITY = 1000
KEYS = st.integers(0, 30)
DATASETS = st.sampled_from(["a", "b", "c"])


def limit(dataset: str, share: float = 1.0, ttl: float = math.inf, most: float = math.inf) -> Quota:
    return Quota(dataset, frozenset([f"{dataset}1", f"{dataset}2"]), share, ttl, most)


def key(number: int) -> bytes:
    return b"%020d" % number


class Accounting(RuleBasedStateMachine):
    """Whatever comes, moves and goes: each block counts once, for one dataset, where it is."""

    @initialize(policy=st.sampled_from(["lru", "minio", "clairvoyant"]))
    def start(self, policy: str) -> None:
        plan = Plan()
        self.limits = Quotas([CAPACITY, CAPACITY], lambda: [make_policy(policy, plan) for _ in range(2)], plan)
        self.limited: dict[str, Quota] = {}
        self.owner: dict[int, str] = {}
        self.kept: dict[int, tuple[int, int]] = {}
        self.coming: dict[int, tuple[int, int]] = {}
        self.read: dict[int, float] = {}
        self.now = 0.0

    @rule(
        dataset=DATASETS,
        share=st.sampled_from([0.1, 0.5, 1.0]),
        ttl=st.sampled_from([5.0, math.inf]),
        most=st.sampled_from([300, 2 * CAPACITY, math.inf]),
    )
    def set_limit(self, dataset: str, share: float, ttl: float, most: float) -> None:
        self.limited[dataset] = limit(dataset, share, ttl, most)
        self.limits.set_quota(self.limited[dataset])

    @rule(dataset=DATASETS)
    def remove(self, dataset: str) -> None:
        self.limited.pop(dataset, None)
        self.limits.remove_quota(dataset)
        self.owner = {number: owner for number, owner in self.owner.items() if owner != dataset}

    @rule(number=KEYS, dataset=DATASETS, tier=st.integers(0, 1), size=st.integers(1, 300), passing=st.booleans())
    def come(self, number: int, dataset: str, tier: int, size: int, passing: bool) -> None:
        self.now += 1
        claimed = self.limits.claim_block(key(number), f"{dataset}1", self.now)
        assert claimed == (dataset in self.limited and number not in self.owner)
        if claimed:
            self.owner[number], self.read[number] = dataset, self.now
        if not passing:
            self.limits.note_added(tier, key(number), size)
            if number in self.owner:
                self.kept[number] = tier, size

    @rule(number=KEYS, tier=st.integers(0, 1), size=st.integers(1, 300))
    def begin(self, number: int, tier: int, size: int) -> None:
        self.limits.note_reserved(tier, key(number), size)
        if number in self.owner and self.kept.get(number, (None, 0))[0] != tier:
            self.coming.setdefault(number, (tier, size))

    @rule(number=KEYS)
    def arrive(self, number: int) -> None:
        self.limits.note_written(key(number))
        self.coming.pop(number, None)

    @rule(numbers=st.lists(KEYS))
    def use(self, numbers: list[int]) -> None:
        self.now += 1
        self.limits.note_accessed([key(number) for number in numbers], self.now)
        self.read |= {number: self.now for number in numbers if number in self.owner}

    @rule(number=KEYS)
    def leave_tier(self, number: int) -> None:
        self.limits.note_removed(key(number))
        self.kept.pop(number, None)

    @rule(number=KEYS)
    def leave(self, number: int) -> None:
        self.limits.forget_block(key(number))
        self.owner.pop(number, None)

    @rule(pinned=st.sets(KEYS))
    def expire(self, pinned: set[int]) -> None:
        self.now += 1
        late = {number for number in self.owner if self.now - self.read[number] > self.limited[self.owner[number]].ttl}
        gone: set[bytes] = set()
        while (found := self.limits.choose_expired(self.now, {key(number) for number in pinned})) is not None:
            gone |= set(found)
            for each in found:
                self.limits.forget_block(each)
        assert gone == {key(number) for number in late - pinned}
        for number in late - pinned:
            del self.owner[number]
        self.read |= dict.fromkeys(late & pinned, self.now)

    @rule(tier=st.integers(0, 1), pinned=st.sets(KEYS))
    def lower(self, tier: int, pinned: set[int]) -> None:
        while gone := self.limits.choose_surplus(tier, CAPACITY // 4, {key(number) for number in pinned}):
            assert len(gone) == len(set(gone))
            for each in gone:
                number = int(each)
                assert number not in pinned
                assert self.kept.pop(number)[0] == tier
                self.limits.note_removed(each)
        for dataset, known in self.limited.items():
            unpinned = sum(self.sizes(dataset, tier, without={*pinned, *self.coming}))
            assert sum(self.sizes(dataset, tier)) <= int(min(known.max_bytes, known.share * CAPACITY)) or not unpinned

    @invariant()
    def counts_are_right(self) -> None:
        for places in (self.kept, self.coming):
            for number in [number for number in places if number not in self.owner]:
                del places[number]
        for dataset, known in self.limited.items():
            used = [sum(self.sizes(dataset, tier)) for tier in (MEMORY, SSD)]
            quota = int(min(known.max_bytes, known.share * CAPACITY))
            allowed = sum(max(0, quota - quota // 64 - each) for each in used)
            assert self.limits.allowance(f"{dataset}2") == (allowed if known.has_size_limit else math.inf)
        for number, owner in self.owner.items():
            for tier in (MEMORY, SSD):
                known = self.limited[owner]
                unlimited = not known.has_size_limit or self.kept.get(number, (None, 0))[0] == tier
                left = int(min(known.max_bytes, known.share * CAPACITY)) - sum(self.sizes(owner, tier))
                assert self.limits.room_left(tier, key(number)) == (math.inf if unlimited else left)

    def sizes(self, dataset: str, tier: int, without: Collection[int] = ()) -> list[int]:
        return [
            size
            for number, (where, size) in [*self.kept.items(), *self.coming.items()]
            if where == tier and self.owner[number] == dataset and number not in without
        ]


Accounting.TestCase.settings = settings(stateful_step_count=30, suppress_health_check=list(HealthCheck))
TestAccounting = Accounting.TestCase


def held(store: OpenStore, numbers: range, tier: int) -> list[int]:
    found = ((number, store.get(key_of(number))) for number in numbers)
    return [number for number, location in found if location is not None and location.tier == tier]


def put(store: OpenStore, numbers: range, snapshot: str) -> None:
    for number in numbers:
        store.put(key_of(number), data_of(number), transient=False, snapshot=snapshot)


@pytest.mark.parametrize("policy", ["lru", "minio", "clairvoyant"])
def test_a_dataset_keeps_to_its_share_of_each_tier_and_leaves_the_rest_to_others(root: Path, policy: str) -> None:
    config = store_config(root, memory=4 << 20, ssd=8 << 20, policy=policy)
    with opened(config) as store:
        store.set_limit(limit("a", share=0.25))
        put(store, range(100), "a1")
        for tier, budget in ((MEMORY, 4 << 20), (SSD, 8 << 20)):
            taken = len(held(store, range(100), tier)) * span(SIZE)
            assert budget / 4 - 2 * span(SIZE) < taken <= budget / 4
        others = 3 * (4 << 20) // 4 // span(SIZE) - 5
        kept = held(store, range(100), SSD)
        put(store, range(1000, 1000 + others), "other")
        assert len(store.keys()) >= others
        assert held(store, range(100), SSD) == kept


def test_a_number_of_bytes_is_a_limit_of_each_tier_and_the_smaller_one_holds(root: Path) -> None:
    with opened(store_config(root, memory=4 << 20, ssd=8 << 20, policy="lru")) as store:
        store.set_limit(limit("a", share=0.5, most=1 << 20))
        put(store, range(100), "a1")
        for tier in (MEMORY, SSD):
            assert (1 << 20) - 2 * span(SIZE) < len(held(store, range(100), tier)) * span(SIZE) <= 1 << 20
        store.set_limit(limit("a", most=2 << 20))
        put(store, range(100, 200), "a1")
        assert (2 << 20) - 2 * span(SIZE) < len(held(store, range(200), SSD)) * span(SIZE) <= 2 << 20


@pytest.mark.parametrize("policy", ["lru", "minio"])
def test_what_is_being_written_counts(root: Path, policy: str) -> None:
    with opened(store_config(root, memory=8 << 20, ssd=0, policy=policy)) as store:
        store.set_limit(limit("a", share=0.25))
        with ThreadPoolExecutor(8) as pool:
            for _ in pool.map(lambda first: put(store, range(first, first + 20), "a1"), range(0, 160, 20)):
                pass
        assert 15 <= len(held(store, range(160), MEMORY)) <= (2 << 20) // span(SIZE)


def test_within_its_share_a_dataset_keeps_what_its_policy_would(root: Path) -> None:
    with opened(store_config(root, memory=4 << 20, ssd=0, policy="lru")) as store:
        store.set_limit(limit("a", share=0.25))
        put(store, range(8), "a1")
        store.accessed([key_of(0)])
        put(store, range(100, 105), "a1")
        assert store.get(key_of(0)) is not None
        assert store.get(key_of(1)) is None
    # A demand read beyond the share passes.
    (root / "minio").mkdir()
    with opened(store_config(root / "minio", memory=4 << 20, ssd=0, policy="minio")) as store:
        store.set_limit(limit("a", share=0.25))
        put(store, range(50), "a1")
        assert store.put(key_of(90), data_of(90), transient=False, snapshot="a1") is None
        assert store.put(key_of(90), data_of(90), snapshot="a1") is not None


def test_in_a_full_tier_a_dataset_at_its_limit_displaces_only_itself(root: Path) -> None:
    with opened(store_config(root, memory=4 << 20, ssd=0, policy="lru")) as store:
        store.set_limit(limit("a", share=0.25))
        put(store, range(200, 240), "other")
        put(store, range(12), "a1")
        others = held(store, range(200, 240), MEMORY)
        put(store, range(12, 60), "a1")
        assert held(store, range(200, 240), MEMORY) == others
        assert held(store, range(60), MEMORY)[-1] == 59


def test_belady_decides_within_a_share(root: Path) -> None:
    with opened(store_config(root, memory=4 << 20, ssd=0, policy="clairvoyant")) as store:
        contents = np.frombuffer(
            b"".join(key_of(number)[:16] for number in range(60)), [("high", "<u8"), ("low", "<u8")]
        )
        store.plan.add_space(BlockSpace("a1", BLOCK_SIZE, np.full(60, SIZE, np.int64), contents))
        store.plan.set_epoch("job", "a1", 0, np.arange(60), is_last=True)
        store.set_limit(limit("a", share=0.25))
        put(store, range(59, -1, -1), "a1")
        kept = held(store, range(60), MEMORY)
        assert kept == list(range(len(kept)))
        assert 7 <= len(kept) <= 10
        assert store.room_for(key_of(50), "a1") < SIZE < store.room_for(key_of(50))


def test_lowered_limits_are_kept_at_the_next_maintenance(root: Path) -> None:
    with opened(store_config(root, memory=4 << 20, ssd=0, policy="minio")) as store:
        put(store, range(25), "a1")
        store.pin([key_of(0)])
        store.set_limit(limit("a", share=0.25))
        store.claim((key_of(number) for number in range(200)), "a2")
        store.accessed([key_of(24)])
        store.maintain()
        left = held(store, range(25), MEMORY)
        assert len(left) * span(SIZE) <= 1 << 20
        assert {0, 24} <= set(left)
        store.remove_limit("a")
        put(store, range(100, 110), "a1")
        assert held(store, range(100, 110), MEMORY) == list(range(100, 110))


def test_what_is_claimed_after_a_restart_moves_down_before_it_goes(root: Path) -> None:
    config = store_config(root, memory=4 << 20, ssd=8 << 20, policy="lru")
    with opened(config) as store:
        store.set_limit(limit("a", share=0.5))
        put(store, range(100), "a1")
        in_memory, in_ssd = held(store, range(100), MEMORY), held(store, range(100), SSD)
    with opened(config) as store:
        store.set_limit(limit("a", share=0.5))
        store.claim(store.keys(), "a1")
        put(store, range(100, 100 + len(in_memory)), "a1")
        assert held(store, range(100), SSD) == sorted([*in_ssd, *in_memory])[-len(in_ssd) :]


def test_a_limit_for_a_full_dataset_leaves_it_what_was_used_last(root: Path) -> None:
    with opened(store_config(root, memory=4 << 20, ssd=8 << 20, policy="lru")) as store:
        put(store, range(200), "a1")
        here = [*held(store, range(200), SSD), *held(store, range(200), MEMORY)]
        store.accessed([key_of(here[0])])
        order = [*here[1:], here[0]]
        store.set_limit(limit("a", share=0.5))
        store.claim(store.keys(), "a1")
        store.maintain()
        left = {number for tier in (MEMORY, SSD) for number in held(store, range(200), tier)}
        assert left == set(order[-len(left) :])
        assert len(left) > len(here) // 2 - 5
        assert set(held(store, range(200), MEMORY)) < set(order[-len(left) // 2 :])


def test_what_nobody_reads_goes_after_its_time_unless_pinned_or_planned(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: clock)
    with opened(store_config(root, memory=4 << 20, ssd=0, policy="clairvoyant")) as store:
        contents = np.frombuffer(
            b"".join(key_of(number)[:16] for number in range(9)), [("high", "<u8"), ("low", "<u8")]
        )
        store.plan.add_space(BlockSpace("a1", BLOCK_SIZE, np.full(9, SIZE, np.int64), contents))
        store.plan.set_epoch("job", "a1", 0, np.array([3, 4]), is_last=True)
        store.set_limit(limit("a", ttl=60))
        put(store, range(9), "a1")
        put(store, range(20, 22), "other")
        store.pin([key_of(0)])
        clock += 40
        store.accessed([key_of(1)])
        store.maintain()
        assert len(store.keys()) == 11
        clock += 40
        store.maintain()
        assert held(store, range(30), MEMORY) == [0, 1, 3, 4, 20, 21]
        store.plan.remove_consumer("job")
        store.unpin([key_of(0)])
        clock += 61
        store.maintain()
        assert held(store, range(30), MEMORY) == [20, 21]
