"""Following a consumer through its sequence, with what a mount would see of it."""

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.pagecache.push_lookahead import PushReader, all_tripwires
from cachefs.planning.sequences.follower import CHUNK_READS, SequenceFollower, observe_reads
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.tripwires import max_interval_in

COUNT = 3000
Order = npt.NDArray[np.int64]


def space_of(count: int = COUNT) -> BlockSpace:
    contents = np.zeros(count, np.dtype([("high", "<u8"), ("low", "<u8")]))
    contents["high"] = np.random.default_rng(0).integers(1, 2**63, count)
    return BlockSpace("s", 1 << 20, np.full(count, 1000, np.int64), contents)


def shuffled(seed: int, count: int = COUNT) -> Order:
    return np.random.default_rng(seed).permutation(count)


def followed(
    *epochs: Order, reorder_window: int = 0, batch: int = 1, name: str = "c", plan: Plan | None = None
) -> SequenceFollower:
    plan = plan or Plan()
    if "s" not in plan.spaces:
        plan.add_space(space_of())
    for number, order in enumerate(epochs):
        plan.set_epoch(name, "s", number, order)
    return SequenceFollower(plan, name, reorder_window, batch)


def read(blocks: Order, *followers: SequenceFollower) -> None:
    for start in range(0, len(blocks), 100):
        observe_reads(followers, blocks[start : start + 100].astype(np.int32))


def as_loaded(order: Order, workers: int, batch: int, seed: int = 0) -> Order:
    """In the order in which *workers* workers read it, each its own batches, at random speeds."""
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]
    queues = [list(np.concatenate(batches[worker::workers])) for worker in range(workers)]
    random = np.random.default_rng(seed)
    result = []
    for _ in range(0, len(order), batch * workers):
        members = [worker for worker, queue in enumerate(queues) for __ in queue[:batch]]
        random.shuffle(members)
        result += [queues[worker].pop(0) for worker in members]
    return np.array(result)


def test_every_read_moves_the_position_through_all_epochs() -> None:
    epochs = [shuffled(1), shuffled(2)]
    follower = followed(*epochs)
    read(epochs[0][:1000], follower)
    assert follower.progress == (0, 1000)
    read(epochs[0][1000:], follower)
    read(epochs[1][:10], follower)
    assert follower.progress == (1, 10)
    assert (follower.evidence.matched, follower.evidence.mismatched, follower.is_following) == (COUNT + 10, 0, True)


def test_workers_that_read_out_of_order_do_not_lose_it() -> None:
    order = shuffled(1)
    follower = followed(order, shuffled(2), reorder_window=4 * 16 * 2, batch=16)
    loaded = as_loaded(order, 4, 16)
    read(loaded[:1500], follower)
    epoch, position = follower.progress
    done = {int(block) for block in loaded[:1500]}
    assert epoch == 0
    assert 1500 - 128 <= position <= 1500
    assert done.issuperset(order[:position].tolist())
    assert follower.evidence.mismatched == 0
    read(loaded[1500:], follower)
    assert follower.progress in ((0, COUNT), (1, 0))


def test_what_was_read_early_is_not_expected_again_in_this_epoch() -> None:
    order = shuffled(1)
    follower = followed(order, shuffled(2), reorder_window=64)
    read(order[[0, 1, 2, 30, 31]], follower)
    assert follower.progress == (0, 3)
    claim = follower.claim_reads(order[[3, 30]].astype(np.int32))
    assert claim.reads[0] == 3
    assert claim.reads[1] >= COUNT
    assert claim.is_own.tolist() == [True, False]
    assert follower.evidence.are_recent(order[[3, 30]].astype(np.int32)).tolist() == [False, True]


@pytest.mark.parametrize("seen", [0.5, 0.1])
def test_reads_from_the_page_cache_are_not_missed(seen: float) -> None:
    order = shuffled(1)
    follower = followed(order, shuffled(2))
    visible = order[np.random.default_rng(5).random(COUNT) < seen]
    read(visible, follower)
    assert follower.is_following
    assert follower.progress[0] == 0
    assert follower.progress[1] > COUNT - 200


def test_a_wrong_sequence_is_noticed_and_given_up() -> None:
    follower = followed(shuffled(1), shuffled(2))
    read(shuffled(9)[:300], follower)
    assert not follower.is_following
    assert follower._plan.is_empty
    assert follower.evidence.mismatched > 200


@pytest.mark.parametrize("reorder_window", [0, 192, 384, 768])
def test_a_wrong_sequence_is_not_found_by_chance(reorder_window: int) -> None:
    follower = followed(shuffled(1), shuffled(2), reorder_window=reorder_window)
    followed_for = 0
    for epoch in range(10):
        order = as_loaded(shuffled(100 + epoch), 4, 32)
        for start in range(0, COUNT, CHUNK_READS):
            read(order[start : start + CHUNK_READS], follower)
            followed_for += CHUNK_READS * follower.is_following
    assert followed_for < 10 * COUNT / 50


def test_a_job_that_resumes_in_the_midst_of_an_epoch_is_found_by_its_first_reads() -> None:
    order = shuffled(1)
    follower = followed(order, shuffled(2), reorder_window=256, batch=32)
    read(np.concatenate([order[start : start + 3] for start in (1408, 1440, 1472, 1504)]), follower)
    assert follower.progress == (0, 1507 - 256)
    assert follower.reads_ahead(order[1507:1508].astype(np.int32)) == 0


def test_a_report_that_was_held_up_is_not_taken_for_somebody_elses() -> None:
    order = shuffled(1)
    follower = followed(order, shuffled(2), reorder_window=256, batch=32)
    held_up = np.arange(0, 320, 3)
    read(order[np.setdiff1d(np.arange(450), held_up)], follower)
    read(order[held_up], follower)
    assert follower.is_following
    assert follower.evidence.mismatched == 0
    read(order[450:460], follower)
    assert follower.reads_ahead(order[460:461].astype(np.int32)) == 0


def test_it_is_found_again_in_an_epoch_of_six_loaders() -> None:
    order = shuffled(1)
    follower = followed(order, shuffled(2), reorder_window=384, batch=32)
    read(order[:64], follower)
    read(order[2000:2200], follower)
    assert follower.is_following
    assert follower.reads_ahead(order[2200:2201].astype(np.int32)) == 0


def test_a_few_reads_of_somebody_else_do_not_move_a_job_that_has_not_begun() -> None:
    follower = followed(shuffled(1), shuffled(2), reorder_window=256, batch=32)
    read(shuffled(9)[:32], follower)
    assert follower.is_following
    assert follower.progress == (0, 0)


def test_it_is_found_again_after_a_jump() -> None:
    epochs = [shuffled(1), shuffled(2)]
    follower = followed(*epochs)
    read(epochs[0][:500], follower)
    read(epochs[0][2000:2200], follower)
    assert follower.is_following
    assert follower.progress == (0, 2200)
    read(epochs[0][100:400], follower)
    assert follower.progress == (0, 400)
    read(epochs[1][:200], follower)
    assert follower.progress == (1, 200)


def test_a_job_that_comes_back_to_its_sequence_is_followed_again() -> None:
    order = shuffled(1)
    follower = followed(order, shuffled(2))
    read(order[:500], follower)
    read(shuffled(9)[:300], follower)
    assert not follower.is_following
    read(order[500:700], follower)
    assert follower.is_following
    assert follower.progress == (0, 700)


def test_two_consumers_and_a_stranger_do_not_disturb_each_other() -> None:
    plan = Plan()
    one = followed(shuffled(1), shuffled(2), plan=plan, name="one")
    two = followed(shuffled(3), shuffled(4), plan=plan, name="two")
    mixed = np.stack((shuffled(1)[:1000], shuffled(3)[:1000], shuffled(7)[:1000]), axis=1).ravel()
    read(mixed, one, two)
    assert one.is_following
    assert two.is_following
    for follower in (one, two):
        epoch, position = follower.progress
        assert epoch == 0
        assert 1000 <= position <= 1100  # some of the stranger's reads fit by chance


def with_blocks_at(order: Order, blocks: Order, place: int) -> Order:
    """The same order, but for *blocks*, which are read from *place* on; those from there change places with them."""
    order = order.copy()
    for number, block in enumerate(blocks.tolist(), place):
        order[np.flatnonzero(order == block)[0]] = order[number]
        order[number] = block
    return order


def test_neighbours_by_chance_do_not_move_a_consumer_that_rests() -> None:
    plan = Plan()
    mine = shuffled(1)
    theirs = with_blocks_at(shuffled(2), mine[300:304], 205)
    one = followed(mine, name="one", plan=plan, reorder_window=256, batch=32)
    two = followed(shuffled(3), theirs, name="two", plan=plan, reorder_window=256, batch=32)
    read(mine[:288], one, two)
    read(shuffled(3), one, two)
    assert two.progress == (0, COUNT)
    read(mine[288:320], one, two)
    assert one.progress == (0, 320)
    assert (two.progress, two.span) == ((0, COUNT), 0), "it has read nothing of its next epoch"


def test_the_first_read_of_a_batch_is_not_taken_for_somebody_elses() -> None:
    plan = Plan()
    mine = shuffled(1)
    theirs = with_blocks_at(shuffled(2), mine[64:65], 34)
    one = followed(mine, name="one", plan=plan, reorder_window=256, batch=32)
    two = followed(theirs, name="two", plan=plan, reorder_window=256, batch=32)
    read(theirs[:32], one, two)
    read(np.concatenate((mine[:10], mine[64:70], mine[10:64])), one, two)
    assert one.progress == (0, 70)
    assert two.progress == (0, 32)
    read(theirs[32:40], one, two)
    assert two.progress == (0, 40)


def test_two_loaders_with_many_workers_are_told_apart() -> None:
    plan = Plan()
    orders = [[shuffled(10 * job + epoch) for epoch in range(3)] for job in range(2)]
    jobs = [
        followed(*epochs[:2], reorder_window=256, batch=32, plan=plan, name=str(job))
        for job, epochs in enumerate(orders)
    ]
    loaded = [np.concatenate([as_loaded(order, 4, 32, seed) for order in orders[seed]]) for seed in range(2)]
    mixed = np.stack((loaded[0][700:2000], loaded[1][:1300]), axis=1).ravel()
    read(loaded[0][:700], jobs[0], jobs[1])
    read(mixed, *jobs)
    for follower, done in zip(jobs, (2000, 1300), strict=True):
        assert follower.is_following
        epoch, position = follower.progress
        assert epoch == 0
        assert done - 256 <= position <= done
    assert sum(follower.evidence.mismatched for follower in jobs) < 100


def test_samples_that_are_parts_of_one_block_are_one_read() -> None:
    blocks = np.repeat(np.arange(COUNT), 40)
    follower = followed(blocks)
    read(np.arange(1000), follower)
    assert follower.is_following
    assert follower.progress[1] > 40 * 999
    assert follower.evidence.mismatched == 0


def test_heartbeats_move_it_where_nothing_is_seen() -> None:
    follower = followed(shuffled(1), shuffled(2))
    follower.on_heartbeat(0, 700)
    assert follower.progress == (0, 700)
    follower.on_heartbeat(1, 5)
    assert follower.progress == (1, 5)
    follower.on_heartbeat(1, 0)
    assert follower.progress == (1, 0)


def test_the_rate_a_reader_could_have_leaves_its_waiting_out() -> None:
    order = shuffled(1)
    follower = followed(order, shuffled(2))
    for second in range(10):
        read(order[100 * second : 100 * second + 100], follower)
        follower.measure_rate(float(second), 0.5, 1)
    assert follower.rate.value == pytest.approx(100, rel=0.05)
    assert follower.rate.demand == pytest.approx(200, rel=0.2)


def test_the_plan_knows_the_rate_as_soon_as_it_is_measured() -> None:
    """Else margins, which are seconds at the measured rate, are taken at the plan's first guess of 1,000 reads per
    second: more than the tiers keep was fetched ahead as a job began, and some of it twice."""
    order, plan = shuffled(1), Plan()
    follower = followed(order, plan=plan)
    for second in range(3):
        read(order[50 * second : 50 * second + 50], follower)
        follower.measure_rate(float(second), 0.0, 4)
    window = plan.window("c", 0, 1)
    assert window is not None
    assert 1 / window.period == pytest.approx(follower.rate.demand)
    assert follower.progress == (0, 150)


def seen_with_wires(follower: SequenceFollower, blocks: Order, every: int) -> None:
    """As a mount with a pusher reports them."""
    ids = blocks.astype(np.int32)
    mine = follower.on_tripwires(ids, every).wires
    observe_reads([follower], ids[~np.isin(ids, mine)])


def test_a_late_read_is_its_own_where_few_reads_show() -> None:
    order, following = shuffled(1, 600), shuffled(2, 600)
    follower = followed(order, following)
    follower.observed_share.hidden_ratio = 64.0
    seen_with_wires(follower, order[31:288:32], 32)
    assert follower.progress == (0, 288)
    for late in range(200, 280, 3):
        if late % 32 != 31:
            seen_with_wires(follower, order[[late]], 32)
    assert (follower.progress, follower.evidence.mismatched) == ((0, 288), 0)


@given(
    st.sampled_from([8, 32, 128]),
    st.sampled_from([0, 64]),
    st.integers(1, 2 * COUNT - 1),
    st.lists(st.integers(1, 4), min_size=1, max_size=40),
)
def test_tripwires_alone_follow_a_reader_through_two_epochs(
    every: int, reorder_window: int, done: int, steps: list[int]
) -> None:
    """However many come in one report. Of one over the end of an epoch, a read may be taken for that of the same block
    before: the next tripwire tells."""
    epochs = [shuffled(1), shuffled(2), shuffled(3)]
    follower = followed(*epochs, reorder_window=reorder_window)
    shown = [read for read in range(done) if read % COUNT & (every - 1) == every - 1]
    reads = np.concatenate(epochs)
    start = 0
    for step in steps * (1 + len(shown) // sum(steps)):
        follower.on_tripwires(reads[shown[start : start + step]].astype(np.int32), every)
        start += step
    epoch, position = follower.progress
    assert 0 <= done - (epoch * COUNT + position) < 3 * every + reorder_window
    assert len(shown) - 2 <= follower.evidence.matched <= len(shown)


@given(st.integers(200, COUNT - 1), st.sampled_from([8, 32]))
def test_a_tripwire_far_ahead_proves_nothing(read: int, every: int) -> None:
    follower = followed(shuffled(1), shuffled(2))
    wire = read | (every - 1)
    blocks = shuffled(1)[[min(wire, COUNT - 1)]].astype(np.int32)
    assert follower.on_tripwires(blocks, every).wires.tolist() == []
    assert (follower.progress, follower.has_begun) == ((0, 0), False)
    assert follower.on_tripwires(blocks, 0).wires.tolist() == []


@pytest.mark.parametrize("reorder_window", [0, 64])
def test_who_was_not_seen_for_a_while_is_where_all_tripwires_are_read(reorder_window: int) -> None:
    order = shuffled(1)
    follower = followed(order, shuffled(2), reorder_window=reorder_window)
    strangers = np.random.default_rng(5).permutation(np.arange(400, COUNT) | 15)[:40]
    for read in strangers[strangers < COUNT].tolist():
        follower.on_tripwires(order[[read]].astype(np.int32), 16)
    assert follower.progress == (0, 0)
    for read in range(407 | 15, 560, 16):
        follower.on_tripwires(order[[read]].astype(np.int32), 16)
    assert 0 <= 560 - follower.progress[1] <= 16 + reorder_window


def test_of_two_readers_each_is_moved_by_its_own_tripwires() -> None:
    plan = Plan()
    one, two = (followed(shuffled(seed), shuffled(seed + 5), name=str(seed), plan=plan) for seed in (1, 2))
    for start in range(31, 1600, 32):
        for follower, order in ((one, shuffled(1)), (two, shuffled(2))):
            ids = order[[start]].astype(np.int32)
            mine = [reader.on_tripwires(ids, 32).wires.tolist() for reader in (one, two)]
            assert ids.tolist() in mine
            assert follower.progress == (0, start + 1)


def test_a_jump_back_is_noticed_though_few_reads_show() -> None:
    order = shuffled(1, 20_000)
    plan = Plan()
    plan.add_space(space_of(20_000))
    follower = followed(order, shuffled(2, 20_000), plan=plan)
    follower.observed_share.hidden_ratio = 16.0
    for read in range(15, 10_000, 16):
        seen_with_wires(follower, order[[read]], 16)
    assert follower.progress == (0, 10_000)
    for read in range(15, 1600, 16):
        seen_with_wires(follower, order[[read]], 16)
    assert follower.is_following
    assert follower.progress == (0, 1600)


@pytest.mark.parametrize("seen", [1.0, 0.5])
@pytest.mark.parametrize("batch", [10, 30, 90])
@pytest.mark.parametrize("count", [100, 300, 900])
def test_a_wrong_place_in_short_epochs_does_not_run_away(count: int, batch: int, seen: float) -> None:
    """From there everything that is read lies ahead, and some of it is tripwires."""
    follower = followed(shuffled(0, count), shuffled(1, count))
    follower.on_heartbeat(0, 2 * count // 3)
    follower.observed_share.hidden_ratio = 8.0
    random = np.random.default_rng(1)
    for number in range(10):
        for start in range(0, count, batch):
            ids = shuffled(number, count)[start : start + batch].astype(np.int32)
            ids = ids[random.random(len(ids)) < seen]
            tripped = follower.on_tripwires(ids, 32, 60).reads
            observe_reads([follower], ids[~np.isin(ids, tripped)])
            following = follower.progress[0] + 1
            if follower._plan.epoch("c", following) is None:
                follower._plan.set_epoch("c", "s", following, shuffled(following, count))
    epoch, position = follower.progress
    assert 9.6 * count <= epoch * count + position <= 10 * count + 64


@pytest.mark.parametrize("hidden", [0.0, 0.5, 0.9])
def test_records_of_large_blocks_read_here_and_there_do_not_carry_it_away(hidden: float) -> None:
    """Each block is read 16 times in an epoch, so nearly any read lies ahead of any place."""
    count, every = 512, 32
    order = np.random.default_rng(1).permutation(16 * count) // 16
    pushed = np.random.default_rng(2).random(count) < hidden
    follower = followed(order)
    follower.observed_share.hidden_ratio = 1 / (1 - hidden)
    for start in range(0, 4096, 64):
        read = order[start : start + 64]
        reported = np.array(list(dict.fromkeys(read[~pushed[read]].tolist())), np.int32)
        passed = follower.on_tripwires(reported, every)
        assert np.isin(passed.wires, passed.reads).all()
        observe_reads([follower], reported[~np.isin(reported, passed.reads)])
        epoch, position = follower.progress
        assert epoch == 0
        assert start + 64 - 3 * every <= position <= start + 64 + every
    assert follower.evidence.mismatched == 0


@pytest.mark.parametrize(
    ("count", "reported"), [*itertools.product((10, 20, 40, 100), (1, 3)), *itertools.product((40, 100), (1000,))]
)
def test_tripwires_alone_follow_who_reads_a_short_epoch_over_and_over(count: int, reported: int) -> None:
    """reported: reads from one report to the next, or those of an epoch, after which tripwires are dropped again."""
    every, epochs = max_interval_in(count), 30
    plan = Plan()
    plan.add_space(space_of(count))
    follower = followed(shuffled(0, count), shuffled(1, count), plan=plan)
    follower.observed_share.hidden_ratio = float(every)
    reader = PushReader("c", "s", 0, 0, every)
    absent, seen = all_tripwires(plan, [reader])["s"], list[int]()
    for number in range(epochs):
        for read, block in enumerate(shuffled(number, count).tolist(), 1):
            if absent[block]:
                seen.append(block)
                absent[block] = False
            if read == count or read % reported == 0:
                seen_with_wires(follower, np.array(seen, np.int64), every)
                following = follower.progress[0] + 1
                if plan.epoch("c", following) is None:
                    plan.set_epoch("c", "s", following, shuffled(following, count))
                absent, seen = all_tripwires(plan, [reader])["s"], []
                assert follower.progress <= (number, read)
    assert follower.is_following
    # Where a report brings all of an epoch, one may be missed.
    assert follower.progress >= ((epochs - 1, count - 2 * every) if reported < count else (epochs - 3, 0))


def test_reads_that_are_reported_before_what_was_read_before_them_are_not_lost() -> None:
    plan = Plan()
    plan.add_space(space_of())
    order = np.random.default_rng(0).permutation(COUNT).astype(np.int32)
    plan.set_epoch("c", "s", 0, order)
    follower = SequenceFollower(plan, "c", reorder_window=256, batch=32)
    observe_reads([follower], order[:32])
    # One worker of the mount reports some of the second batch, and then another one the rest of it.
    observe_reads([follower], order[[51, 52, 54]])
    assert follower.progress == (0, 32)
    observe_reads([follower], np.delete(order[:64], [*range(32), 51, 52, 54]))
    assert (follower.progress, follower.span) == ((0, 64), 0)


def test_what_fits_nobody_for_long_is_forgotten() -> None:
    plan = Plan()
    plan.add_space(space_of())
    order = np.random.default_rng(0).permutation(COUNT).astype(np.int32)
    plan.set_epoch("c", "s", 0, order)
    follower = SequenceFollower(plan, "c", reorder_window=256, batch=32)
    observe_reads([follower], order[[85]])
    for start in range(0, 64, 8):
        observe_reads([follower], order[start : start + 8])
    observe_reads([follower], order[64:85])
    observe_reads([follower], order[86:96])
    assert (follower.progress, follower.span) == ((0, 85), 11), "somebody else has read it"


def test_a_rank_whose_peer_publishes_late_is_followed_again_as_soon_as_the_reads_fit() -> None:
    """Two ranks of a DistributedSampler read the same files. Until the second one has published, its reads speak
    against the first one. Two workers of batches of 64 may be ahead by a third of so short an epoch: latest reads lie
    nowhere closer together than that."""
    count, batch = 950, 64
    order = shuffled(3, 2 * count)
    mine, theirs = order[::2], order[1::2]
    plan = Plan()
    plan.add_space(space_of(2 * count))
    first = followed(mine, mine[::-1], plan=plan, name="rank 0", reorder_window=4 * batch, batch=batch)
    read(np.concatenate((mine[:32], theirs[:128])), first)
    assert not first.is_following, "so many reads of others are no reason to believe in it"
    second = followed(theirs, theirs[::-1], plan=plan, name="rank 1", reorder_window=4 * batch, batch=batch)
    for at in range(32, 640, 32):
        first.on_heartbeat(0, at)
        second.on_heartbeat(0, at + 96)
        read(np.concatenate((mine[at : at + 32], theirs[at + 96 : at + 128])), first, second)
    assert first.evidence.share > 0.9
    assert first.is_following
