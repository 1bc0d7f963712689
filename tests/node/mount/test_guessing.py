"""Programs that have published nothing and read in an order, on real mounts."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cachefs.messages import Empty, ReadaheadCounts
from cachefs.rpc import JOB_LIST
from cachefs_bench.push_paced import resident_bytes
from tests.cachectl import cachectl_says
from tests.daemon import Daemon, Sections, block_ref
from tests.mounting import counters, mounted
from tests.waiting import until

DIRECTORIES, FILES = 3, 100
SIZE = 40_000
LARGE = 24  # blocks of the large file
BLOCK = 128 << 10
# Most blocks of a directory that a copy reads before the daemon has seen that it is one (8 to 12 measured).
FIRST_BLOCKS = 20
# The same, and the blocks whose reads the mount has not reported yet.
FIRST = 50
# For all of it, and more.
ROOM = {"budget": "64MiB", "segment_size": "4MiB"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("origin")
    for directory in range(DIRECTORIES):
        (top / f"d{directory}").mkdir()
        for number in range(FILES):
            content = np.random.default_rng(directory * FILES + number).bytes(SIZE)
            (top / f"d{directory}" / f"{number:04d}").write_bytes(content)
    (top / "large").write_bytes(np.random.default_rng(1).bytes(LARGE * BLOCK))
    return top


@contextmanager
def node(home: Path, tree: Path, *options: str, **sections: dict[str, object]) -> Iterator[tuple[Daemon, Path]]:
    """A daemon with nothing cached, and a mount."""
    settings: Sections = {
        "prefetch": {"guess": True},
        **sections,
        "daemon": {"block_size": BLOCK, **sections.get("daemon", {})},
    }
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(home / "node", settings))
        daemon.add_dataset("data", f"file://{tree}")
        yield daemon, stack.enter_context(mounted(daemon.socket, "data", home / "mnt", *options))


def guessed(daemon: Daemon, mount: Path) -> ReadaheadCounts:
    """Once the mount has reported all."""
    counters(daemon.client, mount)
    return daemon.status().guessed


def copy(mount: Path, to: Path, directories: Sequence[int]) -> None:
    to.mkdir()
    copies = [subprocess.Popen(["cp", "-r", mount / f"d{number}", to]) for number in directories]
    assert [one.wait(60) for one in copies] == [0] * len(copies)


def assert_equal(tree: Path, to: Path, directories: Sequence[int]) -> None:
    copied = {str(path.relative_to(to)): path.read_bytes() for path in to.rglob("*") if path.is_file()}
    assert copied == {
        f"d{d}/{name.name}": name.read_bytes() for d in directories for name in (tree / f"d{d}").iterdir()
    }


def test_a_copy_finds_what_it_comes_to_and_a_scan_fetches_nothing(tmp_path: Path, tree: Path) -> None:
    with node(tmp_path, tree) as (daemon, mount):
        subprocess.run(["du", "-a", mount], check=True, capture_output=True)
        assert daemon.status().fetched_blocks == 0
        copy(mount, tmp_path / "copy", range(1))
        seen = counters(daemon.client, mount)  # once the mount has reported all
        found = daemon.status().guessed
        # A block that is foreseen may still be on its way when it is read: which of the two is quicker, the copy or the
        # disk, is not asserted; most blocks are foreseen, and fewer reads than that find no block in a tier.
        assert found.blocks > FILES - FIRST_BLOCKS
        assert found.right > FILES - FIRST
        assert found.wrong == 0
        assert seen["misses"] < found.right
        assert daemon.status().fetched_blocks <= FILES, "nobody has gone from one directory to the next"
        copy(mount, tmp_path / "copies", range(1, DIRECTORIES))  # at the same time
        seen = counters(daemon.client, mount)
        all_found = daemon.status().guessed
        assert all_found.blocks > DIRECTORIES * (FILES - FIRST_BLOCKS)
        assert seen["misses"] < all_found.right
        assert_equal(tree, tmp_path / "copy", range(1))
        assert_equal(tree, tmp_path / "copies", range(1, DIRECTORIES))
        assert json.loads(cachectl_says(daemon.socket, "status", "--json"))["guessed"]["right"] > found.right


def test_a_reader_that_computes_between_its_files_waits_for_the_first_ones_only(tmp_path: Path, tree: Path) -> None:
    with node(tmp_path, tree, "no_push") as (daemon, mount):

        def is_ahead(read: int) -> bool:
            if daemon.status().fetched_blocks > min(read, FILES - 1):
                return True
            counters(daemon.client, mount)  # the mount reports what was read
            return False

        for read, name in enumerate(sorted(os.listdir(tree / "d0")), 1):
            assert (mount / "d0" / name).read_bytes() == (tree / "d0" / name).read_bytes()
            if daemon.status().guessed.blocks:
                until(partial(is_ahead, read), f"a block is fetched ahead after {read} files")
        assert counters(daemon.client, mount)["misses"] < FIRST_BLOCKS
        assert daemon.status().fetched_blocks == FILES


def test_a_large_file_and_a_second_pass_over_more_than_the_tiers_hold(tmp_path: Path, tree: Path) -> None:
    budget = {"budget": "6MiB", "segment_size": "1MiB"}
    with node(tmp_path, tree, "no_push", memory=budget, ssd={"budget": 0}) as (daemon, mount):
        generator = np.random.default_rng(5)
        order = [mount / f"d{d}" / f"{n:04d}" for d in range(DIRECTORIES) for n in range(FILES)]
        paths = [order[n] for n in generator.permutation(len(order)).tolist()]
        for _ in range(2):
            for path in paths:
                with path.open("rb", buffering=0) as file:
                    assert file.read(SIZE) == (tree / path.relative_to(mount)).read_bytes()
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = guessed(daemon, mount)
        # How many they are depends on how quick the reader is: a sixteenth of the tier may be ahead of it.
        assert found.right >= 15
        with (mount / "large").open("rb", buffering=0) as file, (tree / "large").open("rb") as source:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for number in range(1, LARGE, 2):
                assert os.pread(file.fileno(), 10, number * BLOCK) == os.pread(source.fileno(), 10, number * BLOCK)
        assert guessed(daemon, mount).right > found.right


def test_what_is_guessed_is_pushed_into_the_page_cache(tmp_path: Path, tree: Path) -> None:
    with node(tmp_path, tree) as (daemon, mount):
        paths = sorted((mount / "d0").iterdir())

        def is_seen(right: int, ahead: Sequence[Path]) -> bool:
            return daemon.status().guessed.right >= right or resident_bytes(ahead) > 0

        first = None  # the number of the file after which the daemon had foreseen others
        for number, path in enumerate(paths[:100]):
            assert path.read_bytes() == (tree / "d0" / path.name).read_bytes()
            ahead = paths[number + 1 :]
            if resident_bytes(ahead):
                break
            if first is None and daemon.status().guessed.blocks:
                first = number
            if first is not None:
                until(partial(is_seen, number - first, ahead))
        assert resident_bytes(ahead), "pages of files that nobody has read"
        assert counters(daemon.client, mount)["push_guessed_blocks"] > 0


def test_nothing_is_guessed_where_the_configuration_says_so(tmp_path: Path, tree: Path) -> None:
    with Daemon(tmp_path / "node", {"prefetch": {"guess": False}}) as daemon:
        view = daemon.add_dataset("data", f"file://{tree}")
        for number in range(10):
            daemon.fetch(block_ref(view, f"d0/{number:04d}"))
        assert daemon.status().guessed.blocks == 0


def rows(daemon: Daemon, mount: Path) -> dict[str, ReadaheadCounts]:
    """By rule, once the mount has reported all."""
    counters(daemon.client, mount)
    return {row.rule: row.counts for row in daemon.client.call(JOB_LIST, Empty()).guessed}


def read_whole(mount: Path, tree: Path, names: Sequence[str]) -> None:
    for name in names:
        assert (mount / name).read_bytes() == (tree / name).read_bytes()


def test_a_random_reader_that_stops_early_has_fetched_what_it_has_read(tmp_path: Path, tree: Path) -> None:
    """Counted by the daemon at its origin, at several points at which it might stop."""
    names = [f"d{d}/{n:04d}" for d in range(DIRECTORIES) for n in range(FILES)]
    order = [names[n] for n in np.random.default_rng(11).permutation(len(names)).tolist()]
    with node(tmp_path, tree, memory=ROOM) as (daemon, mount):
        for first, stop in ((0, 8), (8, 30), (30, 75)):
            read_whole(mount, tree, order[first:stop])
            counters(daemon.client, mount)
            assert daemon.status().fetched_bytes <= 1.05 * stop * SIZE


def test_what_is_read_in_any_order_is_brought_once_and_shown(tmp_path: Path, tree: Path) -> None:
    """By two programs, through two mounts."""
    names = [f"d{d}/{n:04d}" for d in range(DIRECTORIES) for n in range(FILES)]
    order = [names[n] for n in np.random.default_rng(7).permutation(len(names)).tolist()]
    with (
        node(tmp_path, tree, memory=ROOM) as (daemon, mount),
        mounted(daemon.socket, "data", tmp_path / "other") as other,
    ):

        def are_all_here() -> bool:
            return daemon.status().fetched_blocks >= len(names)

        for first in range(0, 150, 2):
            read_whole(mount, tree, [order[first]])
            read_whole(other, tree, [order[first + 1]])
        until(are_all_here)  # of a set of which half was read, all is wanted
        read_whole(mount, tree, order[150::2])
        read_whole(other, tree, order[151::2])
        counters(daemon.client, other)
        found = rows(daemon, mount)["set"]
        assert found.right > 100
        assert found.right_bytes == found.right * SIZE
        assert daemon.status().fetched_blocks == len(names), "each has left the origin once"
        shown = cachectl_says(daemon.socket, "job", "list", "--json")
        (row,) = [one for one in json.loads(shown)["guessed"] if one["rule"] == "set"]
        assert row["dataset"] == "data"
        assert row["counts"]["right"] >= found.right
        lines = cachectl_says(daemon.socket, "job", "list").splitlines()
        assert [line for line in lines if line.startswith("data ") and " rest of a directory " in line], lines
        read_whole(mount, tree, order)
        assert daemon.status().fetched_blocks == len(names), "a second epoch fetches nothing"


def test_who_reads_here_and_there_in_large_blocks_gets_its_bytes_first(tmp_path: Path) -> None:
    content, block = np.random.default_rng(7).bytes(64 << 20), 2 << 20
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin" / "tokens").write_bytes(content)
    memory = {"budget": "128MiB", "segment_size": "16MiB"}
    with node(tmp_path, tmp_path / "origin", "no_push", daemon={"block_size": block}, memory=memory) as (daemon, mount):
        with (mount / "tokens").open("rb", buffering=0) as tokens:
            os.posix_fadvise(tokens.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for start in np.random.default_rng(3).integers(0, len(content) - 5000, 60).tolist():
                assert os.pread(tokens.fileno(), 5000, start) == content[start : start + 5000]
        until(lambda: daemon.status().fetched_blocks == len(content) // block)
        assert daemon.status().origin_requests > len(content) // block, "blocks came in parts"
        assert (mount / "tokens").read_bytes() == content
        assert daemon.status().fetched_blocks == len(content) // block


def test_the_rest_of_a_file_comes_also_after_a_restart_of_the_daemon(tmp_path: Path, tree: Path) -> None:
    numbers = list(reversed(range(LARGE)))  # two blocks upwards could be taken for a stream, which is another rule

    def read(mount: Path, some: Sequence[int]) -> None:
        with (mount / "large").open("rb", buffering=0) as file, (tree / "large").open("rb") as source:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for number in some:
                within = number * BLOCK + 10_000  # at its beginning the mount would ask for the next ones, too
                assert os.pread(file.fileno(), 10, within) == os.pread(source.fileno(), 10, within)

    with node(tmp_path, tree, memory=ROOM) as (daemon, mount):
        read(mount, numbers[:3])
        daemon.kill9()
        daemon.start()
        read(mount, numbers[3:8])
        # What a kill takes of the blocks that were just fetched comes again.
        until(lambda: daemon.status().fetched_blocks >= LARGE - 3)
        read(mount, numbers)
        assert rows(daemon, mount)["rest"].right > 0
        assert daemon.status().fetched_blocks <= LARGE, "none comes twice"


def test_a_refresh_in_the_middle_brings_the_rest_of_what_the_mount_shows(tmp_path: Path, tree: Path) -> None:
    home = tmp_path / "origin"
    shutil.copytree(tree, home)
    names = [f"d0/{n:04d}" for n in np.random.default_rng(7).permutation(FILES).tolist()]
    with node(tmp_path, home, memory=ROOM) as (daemon, mount):
        read_whole(mount, home, names[:10])
        (home / "d1" / "0000").write_bytes(b"other")
        daemon.refresh_dataset("data")
        read_whole(mount, home, names[10:60])
        until(lambda: daemon.status().fetched_blocks >= FILES)
        read_whole(mount, home, names[60:])
        assert rows(daemon, mount)["set"].right > 0
