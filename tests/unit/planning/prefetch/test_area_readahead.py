"""Files and directories of which all seems to be wanted: what is brought of them, and what that may cost."""

import random
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.planning.prefetch import readahead_budget
from cachefs.planning.prefetch.area_readahead import (
    INITIAL_BYTES,
    MAX_UNREAD_BLOCKS,
    AreaBlock,
    AreaPosition,
    AreaReadahead,
    AreaSearch,
    AreaSearchResult,
    LocatedMiss,
    MissingAreaBlock,
)
from cachefs.planning.prefetch.areas import (
    ACTIVE_SECONDS,
    IDLE_SECONDS,
    MAX_READS,
    READAHEAD_FACTOR,
    WANTED_SHARE,
    Area,
    CandidateArea,
)
from cachefs.planning.prefetch.readahead_budget import ReadaheadCounters, ReadaheadRule

Block = tuple[int, int]  # file, number
PER_STEP = 4  # blocks that come while a reader reads one


class World:
    """Directories of files of equal size below one directory, and a node that does what is decided."""

    def __init__(self, files: int, per_directory: int, blocks: int = 1, size: int = 100_000) -> None:
        """size: bytes of a block."""
        self.book = ReadaheadCounters()
        self.sweeping = AreaReadahead(self.book)
        self.here: dict[Block, None] = {}
        self.missed: list[Block] = []
        self.brought: list[Block] = []
        self.room = 1 << 50
        self.capacity = 1 << 40  # blocks on the node; what came first is evicted first
        self.now = 0.0
        self.files, self.per_directory, self.blocks, self.size = files, per_directory, blocks, size

    def read(self, reads: Iterable[Block]) -> "World":
        for block in reads:
            self.now += 0.01
            if block in self.here:
                self.sweeping.note_reads([key(block)], self.now)
            else:
                self.missed.append(block)
                self.sweeping.note_miss(("snapshot", *block), self.size, key(block), self.now)
                self.put(block)
            placed = [self._placed(name[1:]) for name, _ in self.sweeping.take_misses()]
            self.sweeping.note_located(placed, self.now)
            self.bring(PER_STEP)
        return self

    def bring(self, blocks: int) -> list[AreaBlock]:
        brought: list[AreaBlock] = []
        for search in self.sweeping.next_searches(self.room, blocks * self.size, self.now):
            brought += self.sweeping.choose_blocks(search, self._find(search))
        for swept in brought:
            self.brought.append(swept.name[1:])
            self.put(swept.name[1:])
            self.sweeping.note_landed(swept)
        return brought

    def put(self, block: Block) -> None:
        self.here[block] = None
        if len(self.here) > self.capacity:
            del self.here[next(iter(self.here))]

    def _placed(self, block: Block) -> LocatedMiss:
        file, number = block
        directory = file // self.per_directory
        first = directory * self.per_directory
        count = min(self.per_directory, self.files - first)
        places = []
        if self.blocks > 1:
            places.append(AreaPosition(Area(ReadaheadRule.REST, "snapshot", file, self.blocks), number, 0))
            places.append(AreaPosition(Area(ReadaheadRule.SHARDS, "snapshot", first, count), file - first, file))
        if number == 0:
            places.append(AreaPosition(Area(ReadaheadRule.SET, "snapshot", first, count), file - first, file))
            if self.files > self.per_directory:
                places.append(AreaPosition(Area(ReadaheadRule.SET, "snapshot", 0, self.files), file, directory))
        return LocatedMiss(("snapshot", *block), self.size, self.size * self.blocks, places)

    def _find(self, search: AreaSearch) -> AreaSearchResult:
        area, missing, looked = search.area.area, list[MissingAreaBlock](), 0
        for place in search.positions:
            if len(missing) * self.size >= search.max_bytes:
                break
            looked += 1
            blocks = [(area.first, place)]
            if area.rule is not ReadaheadRule.REST:
                blocks = [(area.first + place, number) for number in range(min(16, self.blocks))]
            missing += [
                MissingAreaBlock(place, *block, key(block), self.size) for block in blocks if block not in self.here
            ]
        return AreaSearchResult(looked, missing)

    def bytes_missed(self) -> int:
        return len(self.missed) * self.size


def key(block: Block) -> bytes:
    return b"%d/%d" % block


def files(numbers: Iterable[int]) -> list[Block]:
    return [(number, 0) for number in numbers]


def shuffled(count: int, seed: int = 1) -> list[int]:
    return random.Random(seed).sample(range(count), count)


def in_turns(readers: Iterable[Sequence[Block]]) -> list[Block]:
    return [block for block in chain.from_iterable(zip_longest(*readers)) if block is not None]


# --- a set of files ---------------------------------------------------------------------------------------------------


def test_who_reads_a_directory_at_random_waits_for_a_part_of_it_only() -> None:
    for count, size in ((1500, 60_000), (6000, 110_000)):
        world = World(count, count, size=size).read(files(shuffled(count)))
        assert len(world.missed) < (WANTED_SHARE + 0.1) * count
        assert world.book.total.right + len(world.missed) == count, "each was read, and brought once"
        assert world.sweeping.unread_blocks == 0


def test_directories_that_are_read_here_and_there_are_one_set() -> None:
    world = World(6000, 50).read(files(shuffled(6000)))
    assert len(world.missed) < 0.4 * 6000
    assert world.book.total.wrong == 0


def test_the_directory_that_is_read_is_brought_before_others() -> None:
    order = [one * 400 + number for one in range(5) for number in shuffled(400, one)]
    world = World(2000, 400)
    world.read(files(order[:200]))
    assert {file // 400 for file, _ in world.brought} == {0}
    world.read(files(order[200:]))
    assert len(world.missed) < 700
    assert world.book.total.wrong == 0


def test_few_reads_bring_nothing() -> None:
    for world in (World(10_000, 10_000), World(10_000, 10)):
        world.read(files(shuffled(10_000)[:3]))
        assert not world.brought
        assert not world.sweeping.active_areas
    world = World(100_000, 100_000).read(files(shuffled(100_000)[:15]))
    assert not world.brought


def test_a_sample_of_one_percent_of_a_huge_dataset_costs_nothing() -> None:
    count, size = 200_000, 4 << 20  # 800 GB
    world = World(count, 1000, size=size).read(files(shuffled(count)[: count // 100]))
    assert not world.brought


@given(
    st.lists(st.tuples(st.integers(0, 199), st.integers(0, 3)), max_size=400),
    st.sampled_from([10, 50, 200]),
    st.sampled_from([1, 4]),
    st.sampled_from([100_000, 4 << 20]),
    st.integers(20, 1000),
)
def test_whatever_is_read_what_is_brought_for_nothing_is_bounded(
    reads: list[Block], per_directory: int, blocks: int, size: int, capacity: int
) -> None:
    world = World(200, per_directory, blocks, size)
    world.capacity = capacity
    world.read([(file, number % blocks) for file, number in reads])
    counts = world.book.total
    read = len(world.missed) * size * blocks + counts.right_bytes
    areas = 3  # that a read counts for at most here: its file, its directory, and all
    bound = (
        INITIAL_BYTES
        + readahead_budget.MISS_SHARE * world.bytes_missed()
        + counts.right_bytes
        + areas * READAHEAD_FACTOR * read
        + 16 * size
    )
    assert counts.unread_bytes <= bound
    assert counts.blocks - counts.right - counts.wrong == world.sweeping.unread_blocks
    world.now += 2 * IDLE_SECONDS
    world.sweeping.end_idle_areas(world.now)
    assert world.sweeping.unread_blocks == 0
    assert world.sweeping.active_areas == 0
    assert counts.blocks == counts.right + counts.wrong


@settings(max_examples=25)
@given(st.integers(1, 25), st.integers(0, 2**32), st.sampled_from([5, 10, 20, 100, 400, 2400]))
def test_a_random_reader_that_stops_has_had_hardly_anything_brought_for_nothing(
    percent: int, seed: int, per_directory: int
) -> None:
    count = 2400
    read = percent * count // 100
    world = World(count, per_directory, size=110_000).read(files(shuffled(count, seed)[:read]))
    assert len(world.missed) + len(world.brought) <= 1.05 * read


def test_what_does_not_fit_is_not_brought() -> None:
    world = World(2000, 2000)
    world.room = 1200 * world.size
    world.read(files(shuffled(2000)[:700]))
    assert not world.brought
    world.room = 1900 * world.size
    assert world.bring(10)


def test_where_what_is_brought_does_not_stay_nothing_more_is() -> None:
    world = World(2000, 2000)
    world.capacity = 20
    world.read(files(shuffled(2000)))
    assert len(world.brought) < 0.25 * 2000
    assert world.book.total.wrong > 0


def test_a_second_epoch_that_finds_all_here_brings_nothing() -> None:
    world = World(500, 500).read(files(shuffled(500)))
    brought, missed = len(world.brought), len(world.missed)
    world.read(files(shuffled(500, 2)))
    assert (len(world.brought), len(world.missed)) == (brought, missed)


def test_where_a_part_is_here_already_that_is_not_brought_again() -> None:
    world = World(1000, 1000)
    for number in range(0, 1000, 2):
        world.put((number, 0))
    world.read(files(shuffled(1000)))
    assert len(world.missed) + world.book.total.right == 500
    assert len(world.missed) < 370


def test_nothing_is_brought_for_a_reader_who_has_stopped() -> None:
    world = World(2000, 2000).read(files(shuffled(2000)[:700]))
    assert world.bring(1)
    world.now += ACTIVE_SECONDS + 1
    assert not world.bring(1)
    world.read(files(shuffled(2000)[700:710]))
    assert world.bring(1)


# --- a file -----------------------------------------------------------------------------------------------------------


def scattered(count: int, blocks: int, seed: int = 1) -> list[Block]:
    return [(0, number) for number in random.Random(seed).choices(range(blocks), k=count)]


def test_who_reads_a_file_here_and_there_gets_the_rest_of_it() -> None:
    world = World(1, 1, blocks=48, size=4 << 20).read(scattered(400, 48))
    assert len(world.missed) < 26
    assert len(world.here) == 48
    world = World(1, 1, blocks=1000, size=4 << 20).read(scattered(6000, 1000))
    assert len(world.missed) < (WANTED_SHARE + 0.1) * 1000


def test_a_few_reads_of_a_file_bring_nothing() -> None:
    world = World(4, 4, blocks=48, size=4 << 20).read([(0, 5), (1, 7), (2, 8), (0, 40), (1, 20), (0, 0)])
    assert not world.brought


def test_a_file_that_is_read_in_a_part_of_it_is_brought_from_there_on() -> None:
    world = World(1, 1, blocks=10_000, size=4 << 20).read([(0, number) for number in (5000, 5004, 5002, 5006)])
    assert world.brought
    assert all(5000 < number < 5050 for _, number in world.brought)


# --- shards -----------------------------------------------------------------------------------------------------------


def shard(number: int, blocks: int = 8) -> list[Block]:
    return [(number, block) for block in range(blocks)]


def test_a_shard_that_is_read_from_its_beginning_brings_its_rest() -> None:
    world = World(40, 40, blocks=8, size=4 << 20).read(shard(3))
    assert world.missed == shard(3)[:2]
    assert {file for file, _ in world.brought} == {3}, "a copy of one shard brings no other"


def test_the_next_shards_begin_before_they_are_opened() -> None:
    world = World(40, 40, blocks=8, size=4 << 20)
    world.read(chain.from_iterable(shard(number) for number in range(20)))
    assert len(world.missed) <= 4
    assert world.book.total.wrong == 0


@settings(max_examples=14)
@given(st.integers(2, 8), st.booleans())
def test_of_several_processes_each_has_its_own_shards(processes: int, interleaved: bool) -> None:
    each = 64 // processes
    lists = [
        [one + processes * turn if interleaved else one * each + turn for turn in range(each)]
        for one in range(processes)
    ]
    world = World(64, 64, blocks=8, size=4 << 20)
    world.read(in_turns([list(chain.from_iterable(map(shard, mine))) for mine in lists]))
    assert len(world.missed) < 0.4 * processes * each * 8
    assert world.book.total.wrong == 0


def test_shards_in_shuffled_order() -> None:
    world = World(64, 64, blocks=8, size=4 << 20)
    world.read(chain.from_iterable(shard(number) for number in shuffled(64)))
    assert len(world.missed) < 0.25 * 64 * 8


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_a_guess_that_comes_late_is_right_and_one_that_was_evicted_is_wrong() -> None:
    world = World(2000, 2000).read(files(shuffled(2000)[:650]))
    (search,) = world.sweeping.next_searches(world.room, world.size, world.now)
    (swept,) = world.sweeping.choose_blocks(search, world._find(search))
    right = world.book.total.right
    world.sweeping.note_miss(swept.name, swept.size, swept.key, world.now)  # it is on its way
    assert world.book.total.right == right + 1
    (lost,) = world.bring(1)
    wrong = world.book.total.wrong
    world.sweeping.note_miss(lost.name, lost.size, lost.key, world.now)
    assert world.book.total.wrong == wrong + 1


def test_what_could_not_be_fetched_is_not_counted_and_not_tried_for_ever() -> None:
    world = World(2000, 2000).read(files(shuffled(2000)[:650]))
    before, tried = world.book.total.blocks, 0
    for _ in range(1000):
        for search in world.sweeping.next_searches(world.room, world.size, world.now):
            for swept in world.sweeping.choose_blocks(search, world._find(search)):
                world.sweeping.note_undone(swept)
                tried += 1
    assert 0 < tried < 100
    assert world.book.total.blocks == before


def test_memory_is_bounded_whatever_is_read() -> None:
    book = ReadaheadCounters()
    sweeping = AreaReadahead(book)
    for number in range(600):
        snapshot, first = f"snapshot-{number % 300}", number // 300 * 10**6
        area = Area(ReadaheadRule.SET, snapshot, first, 10**6)
        reads = [
            LocatedMiss((snapshot, first + one, 0), 1000, 1000, [AreaPosition(area, one * 50_000, first + one)])
            for one in range(17)
        ]
        sweeping.note_located(reads, number / 100)
        for search in sweeping.next_searches(1 << 50, 1 << 30, number / 100):
            missing = [MissingAreaBlock(one, one, 0, b"%d %d" % (number, one), 1000) for one in search.positions]
            sweeping.choose_blocks(search, AreaSearchResult(len(search.positions), missing))
    assert sweeping.active_areas <= 32
    assert sweeping.unread_blocks <= MAX_UNREAD_BLOCKS
    assert len(list(book.rows())) <= 256


def test_ranks_that_wait_for_the_same_blocks_are_no_sign_of_eviction() -> None:
    world = World(1, 1, blocks=400)
    blocks = scattered(400, 400)
    for block in blocks:
        if block in world.here:
            world.read([block])
            continue
        for _ in range(8):  # all wait before it is here
            world.sweeping.note_miss(("snapshot", *block), world.size, key(block), world.now)
            world.sweeping.note_located(
                [world._placed(name[1:]) for name, _ in world.sweeping.take_misses()], world.now
            )
        world.here[block] = None
        world.bring(PER_STEP)
    assert len(world.brought) > 100


def test_what_is_kept_of_a_set_that_is_read_in_few_directories_is_bounded() -> None:
    candidate = CandidateArea(Area(ReadaheadRule.SET, "snapshot", 0, 1 << 20))
    for place in range(10 * MAX_READS):
        assert not candidate.note_read(place, 1, place % 3)
    assert len(candidate.reads) == MAX_READS
