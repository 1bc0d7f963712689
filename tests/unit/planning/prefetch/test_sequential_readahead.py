"""Readers that nobody has announced: what is guessed for them, and what that may cost."""

import random
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.prefetch import readahead_budget, sequential_readahead
from cachefs.planning.prefetch.sequential_readahead import (
    IDLE_SECONDS,
    MissingBlock,
    SequentialReadahead,
    StreamSearch,
    StreamSearchResult,
)
from cachefs.planning.prefetch.streams import MAX_BLOCKS_AHEAD, StreamBlock, StreamOrder

SIZE = 110 << 10
Block = tuple[int, int]  # entry, number


class World:
    """A snapshot of files in directories of equal size, readers of it, and a node that does what is decided."""

    def __init__(self, files: int = 2000, per_directory: int = 2000, blocks: int = 1, mount: str = "") -> None:
        """mount: where pages are pushed; empty: nowhere."""
        self.guessing = SequentialReadahead()
        self.here: dict[Block, None] = {}
        self.pushed: set[Block] = set()
        self.missed: list[Block] = []
        self.guessed: list[Block] = []
        self.room = 1 << 40
        self.capacity = 1 << 40  # blocks on the node; what came first is evicted first
        self.now = 0.0
        self._files, self._per_directory, self._blocks = files, per_directory, blocks
        self._mount = mount

    def read(self, reads: Iterable[Block]) -> "World":
        for block in reads:
            self._read(block)
        return self

    def _read(self, block: Block) -> None:
        self.now += 0.001
        if block in self.pushed:
            return
        news = True
        if block in self.here:
            news = self.guessing.note_reads([key(block)], self._mount, self.now)
        else:
            self.missed.append(block)
            news = self.guessing.note_miss(("snapshot", *block), SIZE, self._files, self.now)
            self._put(block)
        if news:
            self.look()

    def look(self) -> None:
        """Fetch what is guessed now."""
        guesses: list[StreamBlock] | None = None
        while guesses is None or guesses:
            guesses = [
                guess
                for search in self.guessing.next_searches(self.room, 10_000, self.now)
                for guess in self.guessing.choose_blocks(search, self._find(search))
            ]
            for guess in guesses:
                self._fetch(guess)

    def _fetch(self, guess: StreamBlock) -> None:
        block = guess.name[1:]
        self._put(block)
        self.guessed.append(block)
        if self.guessing.note_landed(guess) and self._mount:
            self.pushed.add(block)

    def _put(self, block: Block) -> None:
        self.here[block] = None
        if len(self.here) > self.capacity:
            del self.here[next(iter(self.here))]

    def _find(self, search: StreamSearch) -> StreamSearchResult:
        blocks = search.blocks
        if search.stream.order is StreamOrder.LISTING:
            directory = search.after // self._per_directory
            ends = (
                self._files if search.crosses_directories else min(self._files, (directory + 1) * self._per_directory)
            )
            blocks = [(entry, 0) for entry in range(search.after + 1, ends)][: sequential_readahead.MAX_EXAMINED]
        missing: list[MissingBlock] = []
        looked = 0
        for looked, (entry, number) in enumerate(blocks, 1):
            if number >= self._blocks:
                return StreamSearchResult(missing, looked - 1, has_ended=True)
            if (entry, number) not in self.here:
                missing.append(MissingBlock(entry, number, key((entry, number)), SIZE, self._reached(search, looked)))
            if len(missing) >= search.max_blocks or len(missing) * SIZE >= search.max_bytes:
                break
        return StreamSearchResult(missing, self._reached(search, looked), has_ended=not blocks)

    @staticmethod
    def _reached(search: StreamSearch, looked: int) -> int:
        return search.after + looked if search.stream.order is StreamOrder.LISTING else looked

    @property
    def unread(self) -> int:
        """Bytes that were fetched on a guess and not read."""
        counts = self.guessing.counts
        return (counts.blocks - counts.right) * SIZE


def key(block: Block) -> bytes:
    return b"%d/%d" % block


def files(numbers: Iterable[int]) -> list[Block]:
    return [(number, 0) for number in numbers]


def shuffled(numbers: Sequence[int], seed: int) -> list[Block]:
    return files(random.Random(seed).sample(numbers, len(numbers)))


def in_turns(readers: Iterable[Sequence[Block]]) -> list[Block]:
    return [block for block in chain.from_iterable(zip_longest(*readers)) if block is not None]


def test_a_reader_in_listing_order_waits_for_the_first_few_files_only() -> None:
    world = World().read(files(range(2000)))
    assert world.missed == files(range(4))
    assert world.guessing.counts.wrong == 0
    assert world.guessing.counts.right == 1996


def test_the_window_doubles_with_every_round_trip_and_has_a_limit() -> None:
    world = World(files=20_000)
    unread = []
    for number in range(20_000):
        world.read([(number, 0)])
        unread.append(len(world.guessed) - world.guessing.counts.right)
    assert unread[4] <= 8
    assert 200 < max(unread) <= MAX_BLOCKS_AHEAD


def test_nothing_is_guessed_beyond_the_end_of_a_directory_before_a_reader_has_gone_there() -> None:
    world = World(per_directory=100).read(files(range(100)))
    assert max(world.guessed) == (99, 0)
    world.read(files(range(100, 200)))
    assert world.missed == files([*range(4), 100])
    assert max(world.guessed) > (200, 0), "it has gone from one directory to the next"


@given(st.integers(2, 16))
def test_readers_of_different_directories_do_not_disturb_each_other(readers: int) -> None:
    world = World(files=readers * 300, per_directory=300)
    world.read(in_turns([files(range(one * 300, one * 300 + 300)) for one in range(readers)]))
    assert len(world.missed) < 30 * readers, "the credit at the start is shared"
    assert world.guessing.counts.wrong == 0


@given(st.integers(2, 8), st.sampled_from([1, 8, 32]))
def test_processes_that_share_out_one_order_profit_together(processes: int, batch: int) -> None:
    batches = [files(range(first, min(first + batch, 2000))) for first in range(0, 2000, batch)]
    rounds = [in_turns(batches[first : first + processes]) for first in range(0, len(batches), processes)]
    world = World().read(chain.from_iterable(rounds))
    assert len(world.missed) < 300
    assert world.guessing.counts.wrong < 100


@given(st.integers(0, 2**32), st.integers(100, 20_000))
def test_a_random_reader_pays_next_to_nothing(seed: int, snapshot: int) -> None:
    world = World(files=snapshot).read(shuffled(range(snapshot), seed)[:2000])
    bound = (
        readahead_budget.INITIAL_BYTES
        + readahead_budget.MISS_SHARE * len(world.missed) * SIZE
        + world.guessing.counts.right * SIZE
        + SIZE
    )
    assert world.unread <= bound


def test_a_random_reader_of_a_usual_dataset_pays_at_most_2_percent() -> None:
    for seed in range(5):
        world = World(files=2000).read(shuffled(range(2000), seed)[:1000])
        assert world.unread <= 0.02 * len(world.missed) * SIZE


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), max_size=400))
def test_whatever_is_read_what_is_guessed_wrongly_is_bounded(reads: list[Block]) -> None:
    world = World(files=61, per_directory=20, blocks=4).read(reads)
    counts = world.guessing.counts
    assert (
        world.unread
        <= readahead_budget.INITIAL_BYTES
        + readahead_budget.MISS_SHARE * len(world.missed) * SIZE
        + counts.right * SIZE
        + SIZE
    )
    assert world.guessing.bytes_ahead == (counts.blocks - counts.right - counts.wrong) * SIZE
    world.now += 2 * IDLE_SECONDS
    world.guessing.end_idle_streams(world.now)
    assert world.guessing.bytes_ahead == 0
    assert world.guessing.streams == 0
    assert counts.blocks == counts.right + counts.wrong


def test_a_second_pass_in_the_order_of_the_first_is_foreseen() -> None:
    order = shuffled(range(2000), 1)
    world = World().read(order)
    assert len(world.missed) > 1900
    world.missed.clear()
    world.here.clear()  # evicted in the meantime
    world.read(order)
    assert len(world.missed) < 30


def test_a_second_pass_whose_blocks_are_partly_here_is_foreseen() -> None:
    order = shuffled(range(2000), 1)
    world = World().read(order)
    world.missed.clear()
    world.here = dict.fromkeys(order[::2])
    world.read(order)
    assert len(world.missed) < 30


def test_a_second_pass_by_several_workers_is_foreseen() -> None:
    order = shuffled(range(2000), 1)
    world = World().read(order)
    world.missed.clear()
    world.here.clear()
    batches = [order[first : first + 32] for first in range(0, 2000, 32)]
    world.read(chain.from_iterable(in_turns(batches[first : first + 4]) for first in range(0, len(batches), 4)))
    assert len(world.missed) < 200


def test_another_order_in_the_second_pass_costs_nothing() -> None:
    world = World().read(shuffled(range(2000), 1))
    world.here.clear()
    world.missed.clear()
    unread = world.unread
    world.read(shuffled(range(2000), 2)[:1000])
    assert world.unread - unread <= 0.02 * len(world.missed) * SIZE


def test_a_large_file_is_read_ahead_in_its_steps() -> None:
    for step in (1, 3):
        blocks = [(5, number) for number in range(1, 600, step)]
        world = World(blocks=600).read(blocks)
        assert len(world.missed) <= 4
        assert set(world.guessed) <= {(5, number) for number in range(0, 600, step)} | set(blocks)


def test_a_read_far_ahead_in_a_file_is_no_part_of_a_stream_though_the_stream_goes_on_there() -> None:
    world = World(blocks=600).read([(5, number) for number in range(1, 20)])
    assert not world.guessing.note_miss(("snapshot", 5, 500), SIZE, 2000, world.now)
    (search,) = world.guessing.next_searches(1 << 30, 100, world.now)
    assert search.after == 500


def test_what_was_passed_was_wrong_and_the_window_shrinks() -> None:
    world = World(files=4000).read(files(range(500)))
    assert world.guessing.counts.wrong == 0
    before = len(world.guessed)
    world.read(files(range(500, 3000, 5)))
    assert world.guessing.counts.wrong > 0
    # Four of five are wrong: the stream has come to its end soon.
    assert len(world.guessed) - before < 400


def test_pushed_blocks_are_read_unseen_and_the_others_tell_where_the_reader_is() -> None:
    world = World(mount="a-mount").read(files(range(2000)))
    assert world.missed == files(range(4))
    assert len(world.pushed) > 1500
    assert world.guessing.counts.wrong == 0
    assert world.guessing.counts.right > 1900


def test_guesses_stay_within_the_room_for_them() -> None:
    world = World()
    world.room = 20 * SIZE
    for number in range(2000):
        world.read([(number, 0)])
        assert world.guessing.bytes_ahead <= 20 * SIZE
    assert len(world.missed) < 10


def test_what_is_read_ahead_does_not_push_out_what_was_read_ahead_before() -> None:
    world = World()
    world.capacity = 50
    world.read(files(range(2000)))
    assert len(world.missed) < 200


def test_a_guess_that_could_not_be_fetched_stops_its_stream_until_the_reader_is_there() -> None:
    decision = SequentialReadahead()
    for number in range(4):
        decision.note_miss(("snapshot", number, 0), SIZE, 100, 0.0)
    (search,) = decision.next_searches(1 << 30, 10_000, 0.0)
    missing = [MissingBlock(number, 0, key((number, 0)), SIZE, number) for number in range(4, 8)]
    guesses = decision.choose_blocks(search, StreamSearchResult(missing, 7, has_ended=False))
    for guess in guesses:
        decision.note_undone(guess)
    assert decision.counts.blocks == 0
    assert decision.bytes_ahead == 0
    assert not decision.next_searches(1 << 30, 10_000, 0.0)
    assert decision.note_miss(("snapshot", 8, 0), SIZE, 100, 0.0)
    assert decision.next_searches(1 << 30, 10_000, 0.0)


def test_memory_is_bounded_whatever_is_read() -> None:
    decision = SequentialReadahead()
    generator = random.Random(3)
    for reader in range(1000):
        snapshot, first = f"snapshot-{reader % 300}", generator.randrange(10**6)
        for number in range(6):
            decision.note_miss((snapshot, first + number, 0), SIZE, 10**6, float(reader))
        for search in decision.next_searches(1 << 40, 10_000, float(reader)):
            entries = range(search.after + 1, search.after + 1 + search.max_blocks)
            missing = [MissingBlock(n, 0, b"%s %d" % (snapshot.encode(), n), SIZE, n) for n in entries]
            decision.choose_blocks(search, StreamSearchResult(missing, entries[-1], has_ended=False))
    assert decision.streams <= sequential_readahead.MAX_STREAMS
    assert decision.bytes_ahead <= sequential_readahead.MAX_STREAMS * 2 * MAX_BLOCKS_AHEAD * SIZE


def entering(world: World, numbers: Iterable[int], blocks: int) -> None:
    """A reader begins each of these files, waits for its first block, and reads so many blocks of it."""
    for number in numbers:
        world.read([(number, 0)])
        if world.guessing.note_file_begun("snapshot", number, world.now):
            world.look()
        world.read((number, block) for block in range(1, blocks))


def test_who_goes_through_large_files_waits_for_their_first_blocks_only() -> None:
    world = World(files=100, blocks=40)
    entering(world, range(3, 100, 7), 40)
    assert world.missed == files(range(3, 100, 7))
    assert {guess.key for guess in world.guessing.take_continued()} == {key((number, 1)) for number in range(3, 100, 7)}
    assert not world.guessing.take_continued()


def test_who_looks_at_the_beginning_of_large_files_pays_for_a_few_only() -> None:
    world = World(files=10_000, blocks=40)
    entering(world, random.Random(0).sample(range(0, 10_000, 11), 500), 1)
    assert len(world.guessed) == sequential_readahead.MAX_BEGUN_FILES
    entering(world, range(1, 10_000, 1009), 40)  # and it does not keep others from being foreseen
    assert world.guessing.counts.right > 300


def test_several_who_wait_for_one_beginning_make_one_stream() -> None:
    world = World(files=100, blocks=40)
    world.read([(3, 0)])
    assert world.guessing.note_file_begun("snapshot", 3, world.now)
    assert not world.guessing.note_file_begun("snapshot", 3, world.now)
    assert world.guessing.streams == 1


def test_only_what_was_guessed_counts_as_begun_in_vain() -> None:
    world = World(files=1000, blocks=40)
    world.room = 0
    entering(world, range(0, 80, 7), 1)
    world.room = 1 << 40
    assert not world.guessed
    entering(world, range(100, 1000, 70), 40)
    assert world.guessing.counts.right > 300


def test_after_an_honest_pass_headers_cost_no_more_than_a_few_blocks() -> None:
    world = World(files=10_000, blocks=3)
    entering(world, range(0, 5000, 7), 3)
    before = len(world.guessed)
    entering(world, range(5000, 10_000, 7), 1)
    assert len(world.guessed) - before <= 16


def test_files_of_two_blocks_take_no_place_from_a_reader_in_order() -> None:
    world = World(files=10_000, blocks=100)
    world.read((9000, number) for number in range(20))
    waited = len(world.missed)
    for number in range(20, 60):
        world._blocks = 2
        entering(world, range(50 * number, 50 * number + 50, 11), 2)
        world._blocks = 100
        world.read([(9000, number)])
    assert not [block for block in world.missed[waited:] if block[0] == 9000]
    assert world.guessing.streams <= 2
