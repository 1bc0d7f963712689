"""Who holds what from epoch to epoch, beside a model that goes block by block, and the shares that theory gives."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.cluster.copies import capacity_by_node, held_bytes
from cachefs.planning.cluster.epoch_reads import FirstReads, ScheduledReads
from cachefs.planning.cluster.homes import NO_NODE
from cachefs.planning.cluster.moves import NEVER, NO_EVENT, WINDOWS, EpochMoves, next_holders, room_prices
from cachefs.planning.cluster.schedule import EpochSchedule, GroupTiming, scheduled_epochs

SIZE = 100


def ranks(draw: np.random.Generator, blocks: int, nodes: int) -> FirstReads:
    """An epoch of a sampler that deals a shuffled dataset out to one rank per node."""
    order = draw.permutation(blocks).astype(np.int32)
    return FirstReads.of(blocks, [(rank, order[rank::nodes]) for rank in range(nodes)])


def scheduled(epochs: Sequence[FirstReads]) -> list[ScheduledReads]:
    """The epochs of one group, which leads."""
    return [ScheduledReads(one, float(number), 1.0) for number, one in enumerate(epochs)]


# --- the model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    nodes: int
    holders: list[int]
    epochs: list[ScheduledReads]
    rooms: list[int]
    sizes: list[int]
    since: float


@dataclass(frozen=True)
class ModelRead:
    time: float
    epoch: int
    reader: int


def reads_of(case: Cluster, block: int) -> list[ModelRead]:
    """All known reads of a block, in order."""
    found = []
    for number, one in enumerate(case.epochs):
        assert one.reads.positions is not None
        time = np.float32(one.begin) + np.float32(one.length) * one.reads.positions[block]
        if one.reads.reader[block] != NO_NODE and time >= np.float32(case.since):
            found.append(ModelRead(float(time), number, int(one.reads.reader[block])))
    return sorted(found, key=lambda read: (read.time, read.epoch))


def next_read(reads: Sequence[ModelRead], node: int) -> float:
    return next((read.time for read in reads if read.reader == node), np.inf)


def worth(reads: Sequence[ModelRead], now: float, node: int, prices: "npt.NDArray[np.float32]") -> float:
    soon = np.float32(next_read(reads, node)) - np.float32(now) + np.float32(1e-6)
    return float(np.float32(1) / soon - prices[min(node, len(prices) - 1)])


def desired(case: Cluster, block: int, prices: "npt.NDArray[np.float32]") -> tuple[int, ModelRead, float] | None:
    """Return the next holder of a block, the read at which it takes the block, and when it reads it next; None: it
    stays."""
    reads, holder = reads_of(case, block), case.holders[block]
    kept = holder
    for index, read in enumerate(reads):
        if read.time >= 1 or read.reader == kept:
            continue
        later = reads[index + 1 :]
        if prices.any():
            wins = worth(later, read.time, read.reader, prices) > worth(later, read.time, kept, prices)
        else:
            wins = next((one.reader for one in later if one.reader in (kept, read.reader)), kept) == read.reader
        kept = read.reader if wins else kept
    if kept == holder:
        return None
    current = [read for read in reads if read.time < 1]
    last = max((index for index, read in enumerate(current) if read.reader == holder), default=-1)
    takes = [index for index, read in enumerate(current) if read.reader == kept]
    index = next((one for one in takes if one > last), takes[-1])
    return kept, current[index], next_read(reads[index + 1 :], kept)


def modelled(case: Cluster, prices: "npt.NDArray[np.float32]") -> dict[int, tuple[int, ModelRead]]:
    """The rule, one block after the other; nodes deny one move at a time, whoever comes first."""
    found = list(case.holders)
    made: dict[int, tuple[int, ModelRead]] = {}
    used = [
        sum(size for size, who in zip(case.sizes, case.holders, strict=True) if who == node)
        for node in range(case.nodes)
    ]
    by_window: dict[int, dict[int, list[tuple[float, int, ModelRead]]]] = {}
    for block in range(len(found)):
        move = desired(case, block, prices)
        if move is not None:
            target, read, soon = move
            window = min(WINDOWS - 1, int(np.float32(read.time) * np.float32(WINDOWS)))
            by_window.setdefault(window, {}).setdefault(target, []).append((soon, block, read))
    for window in sorted(by_window):
        moves = by_window[window]
        for wanted in moves.values():
            wanted.sort(key=lambda one: one[:2])
        while True:
            for target, wanted in moves.items():
                taken = sum(case.sizes[block] for _, block, _ in wanted)
                given = sum(case.sizes[b] for other in moves.values() for _, b, _ in other if found[b] == target)
                if wanted and used[target] + taken - given > case.rooms[target]:
                    wanted.pop()
                    break
            else:
                break
        for target, wanted in moves.items():
            for _, block, read in wanted:
                if found[block] != NO_NODE:
                    used[found[block]] -= case.sizes[block]
                used[target] += case.sizes[block]
                found[block] = target
                made[block] = target, read
    return made


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    nodes = draw(st.integers(1, 5))
    blocks = draw(st.integers(0, 40))
    node = st.one_of(st.integers(0, nodes - 1), st.just(NO_NODE))
    # Few different places, so that windows have many reads, and some are at the same moment.
    places = st.sampled_from([0.0, 0.004, 0.005, 0.5, 0.505, 0.75, 0.999])

    def epoch() -> FirstReads:
        reader = draw(st.lists(node, min_size=blocks, max_size=blocks))
        when = draw(st.lists(places, min_size=blocks, max_size=blocks))
        return FirstReads(np.array(reader, np.uint16), np.array(when, np.float32))

    epochs = scheduled([epoch() for _ in range(draw(st.integers(1, 4)))])
    for _ in range(draw(st.integers(0, 3))):  # of other groups
        begin, length = draw(st.sampled_from([-0.6, -0.25, 0.0, 0.3, 1.2])), draw(st.sampled_from([0.25, 1.0, 2.5]))
        epochs.append(ScheduledReads(epoch(), begin, length))
    holders = draw(st.lists(node, min_size=blocks, max_size=blocks))
    sizes = draw(st.lists(st.integers(1, 9), min_size=blocks, max_size=blocks))
    room = draw(st.lists(st.integers(0, 80), min_size=nodes, max_size=nodes))
    return Cluster(nodes, holders, epochs, room, sizes, draw(st.sampled_from([0.0, 0.3])))


@given(clusters())
def test_holders_are_those_of_the_model(case: Cluster) -> None:
    before, sizes = np.array(case.holders, np.uint16), np.array(case.sizes, np.uint32)
    rooms = np.array(case.rooms, np.int64)
    moves = next_holders(before, case.epochs, rooms, sizes, case.since)
    expected = modelled(case, room_prices(before, case.epochs, rooms, sizes, case.since))
    for block, holder in enumerate(case.holders):
        target, read = expected.get(block, (holder, ModelRead(NEVER, NO_EVENT, 0)))
        assert (moves.following[block], moves.events[block]) == (target, read.epoch)
        assert moves.times[block] == np.float32(read.time)
    used, now = (held_bytes(one, sizes, case.nodes) for one in (before, moves.following))
    assert (now <= np.maximum(rooms, used)).all(), "no node goes above its room, or further above it"


# --- theory -----------------------------------------------------------------------------------------------------------


def local_shares(
    blocks: int, nodes: int, known: int, epochs: int, room: float = 1.01, parts: npt.NDArray[np.float64] | None = None
) -> list[float]:
    """The share of reads of each epoch that are of blocks which their readers hold. known: epochs ahead; room: of all
    nodes together, in datasets."""
    draw = np.random.default_rng(1)
    parts = np.full(nodes, 1 / nodes) if parts is None else parts
    sizes = np.full(blocks, SIZE, np.uint32)
    ahead = [ranks(draw, blocks, nodes) for _ in range(known + 1)]
    holders = draw.choice(nodes, blocks, p=parts).astype(np.uint16)
    found = []
    for _ in range(epochs):
        found.append(float((holders == ahead[0].reader).mean()))
        rooms = (parts * room * blocks * SIZE).astype(np.int64)
        holders = next_holders(holders, scheduled(ahead), rooms, sizes).following
        ahead = [*ahead[1:], ranks(draw, blocks, nodes)]
    return found


@pytest.mark.parametrize(
    ("nodes", "known", "share"),
    [(2, 1, 2 / 3), (4, 1, 0.400), (4, 2, 0.445), (4, 4, 0.451), (8, 2, 0.276), (8, 8, 0.309)],
)
def test_the_share_of_local_reads_is_what_theory_says(nodes: int, known: int, share: float) -> None:
    found = local_shares(40_000, nodes, known, 14)
    assert found[0] == pytest.approx(1 / nodes, abs=0.01)
    assert float(np.mean(found[6:])) == pytest.approx(share, abs=0.012)


def test_full_caches_do_not_deny_every_move() -> None:
    """They would, were each move asked for room alone: then the share stays at 1/4."""
    assert float(np.mean(local_shares(40_000, 4, 4, 12, room=1.0)[5:])) > 0.42


def test_nodes_of_different_sizes_gain_too() -> None:
    parts = np.array([0.5] * 4 + [1.5] * 4) / 8
    assert float(np.mean(local_shares(40_000, 8, 8, 12, parts=parts)[5:])) == pytest.approx(0.288, abs=0.01)


def test_where_only_half_has_room_holders_are_who_would_keep_it() -> None:
    """The moves are those of a cluster that has room for all: each node is given in proportion to what it has."""
    blocks, nodes = 40_000, 4
    sizes = np.full(blocks, SIZE, np.uint32)
    capacities = np.array([1, 1, 2, 4]) * blocks * SIZE // 16
    room = capacity_by_node(capacities, sizes)
    assert room / room.sum() == pytest.approx(capacities / capacities.sum())
    assert room.sum() == pytest.approx(1.01 * blocks * SIZE, rel=1e-6)
    assert float(np.mean(local_shares(blocks, nodes, 4, 12, room=room.sum() / (blocks * SIZE))[5:])) > 0.44


def test_blocks_without_known_reads_stay_where_they_are() -> None:
    draw = np.random.default_rng(3)
    epoch, holders = ranks(draw, 1000, 4), np.random.default_rng(4).integers(0, 4, 1000).astype(np.uint16)
    room, sizes = np.full(4, 1 << 40), np.full(1000, SIZE, np.uint32)
    assert (next_holders(holders, scheduled([epoch]), room, sizes).following == holders).all()
    unread = FirstReads(np.full(1000, NO_NODE, np.uint16), np.full(1000, 2, np.float32))
    moves = next_holders(holders, scheduled([unread, epoch]), room, sizes)
    assert (moves.following == holders).all()
    assert (moves.events == NO_EVENT).all()
    with pytest.raises(ValueError, match="not known"):
        next_holders(holders, scheduled([epoch.without_positions()]), room, sizes)
    with pytest.raises(ValueError, match="at most 255"):
        next_holders(holders, scheduled([epoch] * 256), room, sizes)


def test_epochs_far_ahead_do_without_positions() -> None:
    draw = np.random.default_rng(5)
    epochs = [ranks(draw, 2000, 4) for _ in range(4)]
    holders = draw.integers(0, 4, 2000).astype(np.uint16)
    room, sizes = np.full(4, 1 << 40), np.full(2000, SIZE, np.uint32)
    light = [epochs[0], *(one.without_positions() for one in epochs[1:])]
    found = [next_holders(holders, scheduled(one), room, sizes).following for one in (light, epochs)]
    assert (found[0] == found[1]).all()


# --- several groups ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Epochs per epoch of the first group, and the nodes of its ranks."""

    rate: float
    nodes: tuple[int, ...]


def shares_of_groups(groups: Sequence[Group], room: float = 1.1, nodes: int = 4, blocks: int = 20_000) -> list[float]:
    """Return the share of local reads of each group, after some epochs of the first. room: of all nodes together, in
    datasets."""
    draw = np.random.default_rng(1)
    orders: dict[tuple[int, int], FirstReads] = {}

    def reads(number: int, epoch: int) -> FirstReads:
        if (number, epoch) not in orders:
            order, own = draw.permutation(blocks).astype(np.int32), groups[number].nodes
            orders[number, epoch] = FirstReads.of(
                blocks, [(node, order[rank :: len(own)]) for rank, node in enumerate(own)]
            )
        return orders[number, epoch]

    holders, sizes = draw.integers(0, nodes, blocks).astype(np.uint16), np.full(blocks, SIZE, np.uint32)
    rooms = capacity_by_node(np.full(nodes, int(room * blocks * SIZE / nodes)), sizes)
    local, total = np.zeros(len(groups)), np.zeros(len(groups))
    for number in range(10):
        timings = []
        for index, group in enumerate(groups):
            length, phase = groups[0].rate / group.rate, 0.37 * index
            epoch = int(number / length + phase)
            timings.append(GroupTiming(str(index), "", epoch, (epoch - phase) * length - number, length, length, 99))
        epochs = scheduled_epochs(EpochSchedule(number, 0.0, tuple(timings)), 4)
        all_reads = [ScheduledReads(reads(int(one.group), one.epoch), one.begin, one.length) for one in epochs]
        moves = next_holders(holders, all_reads, rooms, sizes)
        for one, each in zip(epochs, all_reads, strict=True) if number >= 4 else ():
            times = each.times(slice(None))
            here = (times >= 0) & (times < 1)
            before = np.where(moves.times < times, moves.following, holders)
            total[int(one.group)] += here.sum()
            local[int(one.group)] += (here & (before == each.reads.reader)).sum()
        assert (held_bytes(moves.following, sizes, nodes) <= np.maximum(rooms, held_bytes(holders, sizes, nodes))).all()
        holders = moves.following
    return (local / total).tolist()


ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("groups", "least"),
    [
        ([Group(1, ALL), Group(1, ALL)], [0.44, 0.44]),
        ([Group(1, ALL), Group(0.4, ALL)], [0.44, 0.44]),
        ([Group(1, ALL), Group(1, ALL), Group(1, ALL)], [0.42, 0.42, 0.42]),
        ([Group(1, ALL), Group(0.5, (0, 1))], [0.43, 0.40]),
        ([Group(1, (0, 1))], [0.31]),
    ],
)  # fmt: skip
def test_several_jobs_read_as_much_locally_as_one(groups: list[Group], least: list[float]) -> None:
    found = shares_of_groups(groups)
    assert all(share >= bound for share, bound in zip(found, least, strict=True)), found


def test_a_job_on_half_of_the_nodes_reads_most_where_there_is_room() -> None:
    assert shares_of_groups([Group(1, (0, 1))], room=2.2)[0] == pytest.approx(2 / 3, abs=0.02)


def test_prices_are_zero_where_rooms_suffice_and_higher_where_more_is_wanted() -> None:
    draw = np.random.default_rng(2)
    sizes, holders = np.full(8000, SIZE, np.uint32), draw.integers(0, 4, 8000).astype(np.uint16)
    rooms = np.full(4, int(1.1 * 2000 * SIZE))
    even = scheduled([ranks(draw, 8000, 4) for _ in range(5)])
    assert not room_prices(holders, even, rooms, sizes).any()
    order = draw.permutation(8000).astype(np.int32)
    half = scheduled([FirstReads.of(8000, [(0, order[0::2]), (1, order[1::2])]) for _ in range(5)])
    prices = room_prices(holders, half, rooms, sizes)
    assert prices[:2].min() > 0.5
    assert not prices[2:].any()


# --- decided anew in the midst of an epoch ----------------------------------------------------------------------------


def test_moves_before_a_new_schedule_stay_decided_and_follow_its_timing() -> None:
    draw = np.random.default_rng(6)
    first, second, third = (ranks(draw, 3000, 4) for _ in range(3))
    holders, sizes, rooms = (
        draw.integers(0, 4, 3000).astype(np.uint16),
        np.full(3000, SIZE, np.uint32),
        np.full(4, 1 << 40),
    )
    before = [ScheduledReads(first, 0, 1), ScheduledReads(third, 0.1, 1), ScheduledReads(second, 1, 1)]
    slower = [ScheduledReads(first, 0, 1), ScheduledReads(third, 0.1, 3), ScheduledReads(second, 1, 1)]
    decided = next_holders(holders, before, rooms, sizes)
    numbers = np.full(256, NO_EVENT, np.uint8)
    numbers[:3] = 0, 1, 2
    timed = decided.rescheduled(numbers, slower)
    moved = decided.events == 1
    assert moved.any()
    assert third.positions is not None
    assert timed.times[moved] == pytest.approx(0.1 + 3 * third.positions[moved])
    anew = next_holders(timed.holders_at(0.5, holders), slower, rooms, sizes, 0.5).keep_earlier(timed, 0.5)
    early = timed.times < 0.5
    assert (anew.following[early] == decided.following[early]).all()
    assert (anew.times[~early] >= 0.5).all()
    # A group that has ended is in no schedule any more.
    gone = decided.rescheduled(np.full(256, NO_EVENT, np.uint8), slower[:1])
    assert (gone.times == decided.times).all()
    assert (gone.events == NO_EVENT).all()


@given(clusters())
def test_moves_follow_from_the_holders_before_and_after(case: Cluster) -> None:
    """As on a node that learns from another one what was decided."""
    before, rooms, sizes = (
        np.array(case.holders, np.uint16),
        np.array(case.rooms, np.int64),
        np.array(case.sizes, np.uint32),
    )
    decided = next_holders(before, case.epochs, rooms, sizes, case.since)
    found = EpochMoves.between(before, decided.following, case.epochs, case.since)
    assert (found.following == decided.following).all()
    assert (found.events == decided.events).all()
    assert (found.times == decided.times).all()


def test_moves_that_an_earlier_schedule_of_the_epoch_decided_follow_from_the_holders_too() -> None:
    draw = np.random.default_rng(1)
    epochs = scheduled([ranks(draw, 3000, 4) for _ in range(4)])
    holders, sizes, rooms = (
        draw.integers(0, 4, 3000).astype(np.uint16),
        np.full(3000, SIZE, np.uint32),
        np.full(4, 1 << 40),
    )
    first = next_holders(holders, epochs, rooms, sizes)
    anew = next_holders(first.holders_at(0.5, holders), epochs, rooms, sizes, 0.5).keep_earlier(first, 0.5)
    assert (anew.times < 0.5).any()
    found = EpochMoves.between(holders, anew.following, epochs, 0.5)
    assert (found.times == anew.times).all()
