"""What is pushed, dropped and checked next in one mount's page cache, without a daemon and without a clock."""

import numpy as np
import pytest

from cachefs.planning.blocks.presence import ABSENT, IN_MEMORY, Presence
from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.pagecache import push_plan
from cachefs.planning.pagecache.model import RECHECK_SECONDS
from cachefs.planning.pagecache.push_lookahead import PushReader
from cachefs.planning.pagecache.push_plan import (
    CHECK_SECONDS,
    COMMAND_BLOCKS,
    MAX_OPEN_COMMANDS,
    NO_CONSUMERS,
    REFUSED_SECONDS,
    UNPLANNED_SECONDS,
    FileBlocks,
    MountConsumers,
    PageAction,
    PageCommand,
    PushPlan,
)
from cachefs.planning.pagecache.states import HELD, OUT, REFUSED, Blocks
from cachefs.planning.sequences.plan import Plan
from tests.simulated import space_of

COUNT = 30
SIZE = 100_000
FIRST_SERIAL = 1000
NONE_FAILED = np.zeros(0, np.uint32)


class Mount:
    """A plan for one mount of snapshot `s`, all of whose blocks are on the node. Its consumer `c` reads 1,000 a second,
    in order."""

    def __init__(self, space: BlockSpace, every: int = 0) -> None:
        """every: reads from one tripwire to the next."""
        self.space = space
        self.plan = Plan()
        self.plan.add_space(space)
        self.plan.set_epoch("c", "s", 0, np.arange(space.count), is_last=True)
        self.presence = presence = Presence()
        presence.add_space(space)
        presence.set_states("s", np.arange(space.count, dtype=np.int32), [IN_MEMORY] * space.count)
        self.reader = PushReader("c", "s", 0, 0, every)
        self.audience = MountConsumers([self.reader])
        self.pushes = PushPlan(self.plan, presence, lambda snapshot: True, FIRST_SERIAL)

    def begin(self, budget: int, *held: FileBlocks, now: float = 0.0) -> None:
        self.pushes.start_pusher(budget, held, now)

    def orders(self, now: float) -> list[PageCommand]:
        return list(self.pushes.next_commands(self.audience, now))

    def carry_out(self, now: float) -> list[PageCommand]:
        """All orders there are, until there are no more."""
        done: list[PageCommand] = []
        while orders := self.orders(now):
            for order in orders:
                self.pushes.note_done(order.serial, NONE_FAILED, now)
            done += orders
        return done

    def read(self, *ids: int) -> None:
        self.pushes.pages.note_read(Blocks("s", np.array(ids, np.int32)), np.zeros(0, np.int32), now=0.0)


@pytest.fixture
def mount() -> Mount:
    return Mount(space_of([SIZE] * COUNT, "s"))


def held(snapshot: str, *entries: int) -> FileBlocks:
    return FileBlocks(snapshot, np.array(entries, np.int64), np.zeros(len(entries), np.int64))


def ids_of(order: PageCommand) -> list[int]:
    assert order.ids is not None
    return order.ids.tolist()


def test_what_is_read_soonest_is_stored_first_and_within_the_budget(mount: Mount) -> None:
    mount.begin(20 * SIZE)
    [order] = mount.orders(0.0)
    # Half of the share that is kept free is left to pages that readers bring.
    stored = int(20 * (1 - 1 / 32))
    assert (order.serial, order.action, ids_of(order)) == (FIRST_SERIAL, PageAction.STORE, list(range(stored)))
    assert (order.files.entries.tolist(), order.files.numbers.tolist()) == (list(range(stored)), [0] * stored)
    assert (order.size, mount.pushes.pages.used) == (stored * SIZE, stored * SIZE)
    assert mount.orders(0.1) == []


def test_what_was_stored_is_counted_by_snapshot(mount: Mount) -> None:
    mount.begin(64 * SIZE)
    [order] = mount.orders(0.0)
    assert mount.pushes.stored_bytes == {}, "nobody has said that it is done"
    mount.pushes.note_done(order.serial, np.array([0, 2], np.uint32), 0.1)
    assert mount.pushes.stored_bytes == {"s": (COUNT - 2) * SIZE}


def test_what_is_evicted_makes_room_once_it_is_gone(mount: Mount) -> None:
    mount.begin(24 * SIZE)
    stored = ids_of(mount.carry_out(0.0)[0])
    mount.plan.set_progress("c", 0, 10)
    [dropped] = mount.orders(0.5)
    assert (dropped.action, dropped.size) == (PageAction.DROP, 0)
    # Some of those that were read.
    assert set(ids_of(dropped)) <= set(range(10))
    assert mount.orders(0.6) == []
    mount.pushes.note_done(dropped.serial, NONE_FAILED, 0.7)
    [order] = [order for order in mount.orders(1.0) if order.action is PageAction.STORE]
    assert ids_of(order)[0] == stored[-1] + 1
    assert mount.pushes.pages.used <= 24 * SIZE


def test_only_so_many_orders_are_open(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_plan, "COMMAND_BYTES", SIZE)
    mount.begin(64 * SIZE)
    orders = mount.orders(0.0)
    assert [ids_of(order) for order in orders] == [[number] for number in range(MAX_OPEN_COMMANDS)]
    assert mount.pushes.is_busy
    assert mount.orders(0.1) == []
    mount.pushes.note_done(orders[0].serial, NONE_FAILED, 0.2)
    assert not mount.pushes.is_busy
    assert [ids_of(order) for order in mount.orders(0.2)] == [[MAX_OPEN_COMMANDS]]


def test_what_nobody_asked_for_any_more_is_ordered_later(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_plan, "COMMAND_BYTES", SIZE)
    mount.begin(64 * SIZE)
    orders = mount.pushes.next_commands(mount.audience, 0.0)
    assert [ids_of(next(orders)), ids_of(next(orders))] == [[0], [1]]
    assert ids_of(mount.orders(0.1)[0]) == [2]


def test_a_block_that_is_larger_than_an_order_is_ordered_alone(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_plan, "COMMAND_BYTES", SIZE // 2)
    mount.begin(64 * SIZE)
    assert [ids_of(order) for order in mount.orders(0.0)[:3]] == [[0], [1], [2]]


def test_what_failed_is_tried_again_after_a_while(mount: Mount) -> None:
    mount.begin(64 * SIZE)
    [order] = mount.orders(0.0)
    mount.pushes.note_done(order.serial, np.array([3, 4], np.uint32), 0.1)
    assert mount.pushes.pages.states["s"][[2, 3, 4]].tolist() == [HELD, REFUSED, REFUSED]
    assert mount.orders(1.0) == []
    [again] = mount.orders(0.1 + REFUSED_SECONDS)
    assert ids_of(again) == [3, 4]


def test_the_time_that_an_order_takes_is_learnt_from_orders_to_store(mount: Mount) -> None:
    mount.begin(24 * SIZE)
    [order] = mount.orders(0.0)
    mount.pushes.note_done(order.serial, NONE_FAILED, 0.5)
    assert mount.pushes.latency == pytest.approx(0.1)
    mount.plan.set_progress("c", 0, 10)
    [dropped] = mount.orders(0.5)
    mount.pushes.note_done(dropped.serial, NONE_FAILED, 9.5)
    assert mount.pushes.latency == pytest.approx(0.1)


def test_what_an_order_left_open_counts_as_pushed(mount: Mount) -> None:
    mount.begin(16 * SIZE)
    [order] = mount.orders(0.0)
    used = mount.pushes.pages.used
    mount.begin(32 * SIZE, now=1.0)
    checked, following = mount.orders(1.0)
    assert (checked.action, ids_of(checked)) == (PageAction.CHECK, ids_of(order))
    assert ids_of(following)[0] == ids_of(order)[-1] + 1
    assert mount.pushes.pages.used == used + len(ids_of(following)) * SIZE <= 32 * SIZE
    mount.pushes.note_done(order.serial, np.array([0], np.uint32), 1.1)
    assert mount.pushes.pages.states["s"][0] == HELD


def test_what_came_long_ago_is_checked_before_it_is_read(mount: Mount) -> None:
    mount.begin(64 * SIZE)
    mount.carry_out(0.0)
    assert mount.orders(RECHECK_SECONDS) == []
    now = RECHECK_SECONDS + CHECK_SECONDS
    [checked] = mount.orders(now)
    assert (checked.action, checked.size) == (PageAction.CHECK, 0)
    assert ids_of(checked) == list(range(COUNT))
    mount.pushes.note_done(checked.serial, np.array([COUNT - 1], np.uint32), now)
    assert mount.pushes.pages.states["s"][COUNT - 1] == REFUSED


def absent(mount: Mount, *ids: int) -> None:
    """These blocks are in no tier."""
    mount.presence.set_states("s", np.array(ids, np.int32), [ABSENT] * len(ids))


def test_only_copies_are_looked_for_in_time_to_fetch_them(mount: Mount) -> None:
    mount.plan.set_progress("c", 0, 0, 0.5)  # 30 blocks in a minute
    mount.begin(64 * SIZE)
    mount.carry_out(0.0)
    absent(mount, 4, 20)
    now = 30.0
    [checked] = list(mount.pushes.next_commands(mount.audience, now, lead=1.0))
    assert (checked.action, ids_of(checked)) == (PageAction.CHECK, [0, 4]), "20 is read in 40 s"
    assert list(mount.pushes.next_commands(mount.audience, now + 2 * CHECK_SECONDS, lead=1.0)) == [], "under way"
    mount.pushes.note_done(checked.serial, np.array([1], np.uint32), now + 1)
    assert mount.pushes.pages.states["s"][4] == REFUSED
    [again] = list(mount.pushes.next_commands(mount.audience, now + 1, lead=33.0))
    assert ids_of(again) == [20]


def test_only_copies_that_come_too_soon_for_a_push_are_looked_for_too(mount: Mount) -> None:
    mount.plan.set_progress("c", 0, 0, 0.5)
    mount.begin(64 * SIZE)
    mount.carry_out(0.0)
    absent(mount, 4)
    resting = MountConsumers([PushReader("c", "s", 20, 0, 0)])  # it may have gone on unseen by 20 reads
    [checked] = list(mount.pushes.next_commands(resting, 30.0, lead=1.0))
    assert (checked.action, ids_of(checked)) == (PageAction.CHECK, [4])


def test_no_more_is_checked_at_once_than_a_pusher_has_time_for(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_plan, "MAX_CHECKED_BLOCKS", 5)
    mount.begin(64 * SIZE)
    mount.carry_out(0.0)
    absent(mount, *range(COUNT))
    given = [mount.orders(100.0 + number) for number in range(4)]
    assert [[ids_of(one) for one in orders] for orders in given] == [[[*range(5)]], [[*range(5, 10)]], [], []]


def test_a_pusher_that_only_checks_stores_and_drops_nothing(mount: Mount) -> None:
    mount.pushes.start_pusher(0, [], 0.0, pushes=False)
    assert mount.orders(0.0) == []
    mount.read(*range(10))
    absent(mount, 1, 2)
    [checked] = mount.orders(10.0)
    assert (checked.action, ids_of(checked)) == (PageAction.CHECK, [1, 2])
    assert mount.carry_out(20.0) == []


def test_a_tripwire_that_is_the_only_copy_stays() -> None:
    mount = Mount(space_of([SIZE] * COUNT, "s"), every=8)
    mount.begin(64 * SIZE)
    mount.carry_out(0.0)
    mount.read(7, 15)
    absent(mount, 15)
    dropped = [one for one in mount.orders(1.0) if one.action is PageAction.DROP]
    assert [ids_of(one) for one in dropped] == [[7]]


def test_what_no_tier_will_keep_is_not_dropped_while_its_next_read_is_only_expected() -> None:
    """Nobody has published the next epoch. All that was read is expected at one time, which comes nearer between two
    looks at what the tiers keep: once 48 of 800 blocks were dropped, and many of them fetched again."""
    count, rate = 800, 200
    space = space_of([SIZE] * count, "s")
    mount = Mount(space)
    mount.plan.set_epoch("c", "s", 0, np.arange(count))
    mount.pushes = PushPlan(mount.plan, mount.presence, lambda snapshot: True, FIRST_SERIAL, lambda: 400 * SIZE)
    mount.begin(120 * SIZE)
    for step in range(20 * count // rate):
        now = step / 20
        if step % 5 == 0:  # a heartbeat
            mount.plan.set_progress("c", 0, int(rate * now), rate)
        assert [one.action for one in mount.carry_out(now) if one.action is PageAction.DROP] == [], now


def test_what_a_job_has_read_before_it_was_planned_is_not_dropped_where_no_tier_will_keep_it() -> None:
    """Where a small budget was exceeded as the plan came, 55 of 800 blocks were dropped, and fetched again."""
    space, plan, presence = space_of([SIZE] * 800, "s"), Plan(), Presence()
    pushes = PushPlan(plan, presence, lambda snapshot: True, FIRST_SERIAL, lambda: 400 * SIZE)
    pushes.start_pusher(120 * SIZE, [], 0.0)
    assert list(pushes.next_commands(NO_CONSUMERS, 10.0)) == []
    pushes.pages.note_read_keys(space.keys(np.arange(160)), {}, 10.0)
    plan.add_space(space)
    plan.set_epoch("c", "s", 0, np.arange(800))
    plan.set_progress("c", 0, 160, 200.0)
    presence.add_space(space)
    presence.set_states("s", np.arange(160, dtype=np.int32), [IN_MEMORY] * 160)
    found = list(pushes.next_commands(MountConsumers([PushReader("c", "s", 0, 0, 0)]), 10.05))
    assert [one.action for one in found if one.action is PageAction.DROP] == []


def test_pages_that_nobody_plans_are_dropped_before_more_is_pushed(mount: Mount) -> None:
    unplanned = list(range(5, 5 + COMMAND_BLOCKS + 4))
    mount.begin(20 * SIZE, held("s", 0, 1, 2), held("old", *unplanned))
    assert mount.orders(UNPLANNED_SECONDS) == []
    assert mount.pushes.pages.used == 3 * SIZE
    now = UNPLANNED_SECONDS + 0.1
    dropped = mount.orders(now)
    assert [(one.files.snapshot, one.action, one.ids) for one in dropped] == [("old", PageAction.DROP, None)] * 2
    assert [entry for one in dropped for entry in one.files.entries.tolist()] == unplanned
    for order in dropped:
        mount.pushes.note_done(order.serial, NONE_FAILED, now)
    checked, stored = mount.orders(now)
    assert (checked.action, ids_of(checked)) == (PageAction.CHECK, [0, 1, 2])
    assert (stored.action, ids_of(stored)[0]) == (PageAction.STORE, 3)


def test_pages_of_an_earlier_daemon_are_kept_for_a_job_that_goes_on(mount: Mount) -> None:
    late = space_of([SIZE] * 4, "late", seed=1)
    mount.begin(64 * SIZE, held("late", 1, 3, 7))
    assert mount.orders(UNPLANNED_SECONDS / 2) == []
    mount.plan.add_space(late)
    mount.orders(UNPLANNED_SECONDS / 2 + 1)
    assert mount.pushes.pages.states["late"].tolist() == [OUT, HELD, OUT, HELD]
    assert not any(order.action is PageAction.DROP for order in mount.carry_out(10 * UNPLANNED_SECONDS))


def test_what_is_read_through_another_mount_is_dropped_unless_somebody_here_has_read_it(mount: Mount) -> None:
    mount.begin(64 * SIZE)
    [stored] = mount.carry_out(0.0)
    assert ids_of(stored) == list(range(COUNT))
    mount.read(3, 4)
    assert list(mount.pushes.states) == ["s"]
    mount.audience = MountConsumers([], frozenset({"s"}))
    [dropped] = mount.orders(0.1)
    assert dropped.action is PageAction.DROP
    assert ids_of(dropped) == [number for number in range(COUNT) if number not in (3, 4)]
    assert mount.pushes.states == {}
    mount.pushes.note_done(dropped.serial, NONE_FAILED, 0.2)
    assert mount.orders(10.0) == []


def test_tripwires_of_which_a_part_is_there_are_dropped() -> None:
    """Or they would not show in the next epoch."""
    large, count = 4 << 20, 64
    mount = Mount(space_of([large] * count, "s", block_size=large), every=8)
    mount.begin(count * large)
    mount.pushes.pages.follow_plan()
    mount.read(*range(count))
    dropped = mount.orders(0.0)[0]
    assert (dropped.action, ids_of(dropped)) == (PageAction.DROP, list(range(7, count, 8)))


def test_for_nobody_nothing_is_pushed(mount: Mount) -> None:
    mount.begin(64 * SIZE)
    assert list(mount.pushes.next_commands(NO_CONSUMERS, 0.0)) == []
    mount.pushes.note_done(FIRST_SERIAL, NONE_FAILED, 0.0)  # of an earlier subscription


def test_what_is_guessed_is_stored_after_what_is_published_where_there_is_room(mount: Mount) -> None:
    mount.begin(60 * SIZE)
    mount.pushes.queue_readahead(held("other", 7, 8), 2 * SIZE)
    published, guessed = mount.orders(0.0)
    assert ids_of(published) == list(range(COUNT))
    assert (guessed.action, guessed.ids, guessed.size) == (PageAction.STORE, None, 2 * SIZE)
    assert guessed.files.entries.tolist() == [7, 8]
    used = mount.pushes.pages.used
    mount.pushes.note_done(published.serial, NONE_FAILED, 0.1)
    mount.pushes.note_done(guessed.serial, NONE_FAILED, 0.1)
    assert mount.pushes.pages.used == used, "they are like pages that readers bring"
    mount.pushes.queue_readahead(held("other", 9), 30 * SIZE)
    assert mount.orders(0.2) == []


def test_guesses_that_are_not_taken_do_not_pile_up(mount: Mount) -> None:
    for entry in range(1000):
        mount.pushes.queue_readahead(held("other", entry), SIZE)
    mount.begin(1 << 40)
    _, *guessed = mount.orders(0.0)
    assert [order.files.entries.tolist() for order in guessed] == [
        [entry] for entry in range(1000 - MAX_OPEN_COMMANDS, 999)
    ]
