"""The state directory, and the index that a start makes of the last one's."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import lmdb
import psutil
import pytest

from cachefs.block import KEY_SIZE, MEMORY, BlockLocation
from cachefs.errors import CachefsError, ConfigError
from cachefs.index import BLOCKS_DB, MAX_DBS
from cachefs_daemon.store import config_check, index_copy, recovery, state_format
from cachefs_daemon.store.index_writer import IndexWriter, open_environment
from cachefs_daemon.store.state_dir import StateDirectory
from cachefs_daemon.store.storage import StoreConfig
from cachefs_daemon.store.tier import TierConfig
from tests.blockstore import key_of

HERE = BlockLocation(MEMORY, 1, 4096, 1, bytes(8))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a daemon that was stopped in order, with 10 entries in its index."""
    state = StateDirectory(tmp_path / "state")
    index = recovery.open_index(state)
    for number in range(10):
        index.put(key_of(number), HERE)
    assert index.close()
    state.mark_clean()
    state.close()
    return state.directory


def start(directory: Path) -> tuple[str, int]:
    """Name of the index of a daemon that starts, and how many entries it has."""
    state = StateDirectory(directory)
    try:
        index = recovery.open_index(state)
        try:
            return index.path.name, index.count_keys()
        finally:
            index.close()
    finally:
        state.close()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_start_that_is_killed_while_it_copies_the_index_costs_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(old: Path, new: Path) -> str:
        index = IndexWriter(new)
        index.put(key_of(0), HERE)
        assert index.close()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(recovery, "copy_entries", half)
        with pytest.raises(KeyboardInterrupt):
            start(directory)
    assert len(names(directory)) > 3
    assert start(directory) == ("index-2.lmdb", 10)
    assert names(directory) == ["format", "index-2.lmdb", "index-2.lmdb-lock", "lock", "running"]


def test_a_start_that_finds_no_room_for_an_index_costs_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        path.write_bytes(b"half a page")
        raise CachefsError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(recovery, "copy_entries", lambda old, new: "No space left on device")
        patched.setattr(recovery, "make_empty", full)
        with pytest.raises(CachefsError, match="no space"):
            start(directory)
    assert start(directory)[1] == 10


def test_the_copying_child_ends_with_the_daemon(tmp_path: Path) -> None:
    """Else it writes on into a file that the next start has given up, and takes its disk and processor."""
    os.mkfifo(tmp_path / "old")  # a process that opens it waits
    code = "import sys; from cachefs_daemon.store.index_copy import copy_entries; copy_entries(*sys.argv[1:])"
    daemon = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "old"), str(tmp_path / "new")])
    try:
        children: list[psutil.Process] = []
        while not children and daemon.poll() is None:
            children = psutil.Process(daemon.pid).children()
    finally:
        daemon.send_signal(signal.SIGKILL)
        daemon.wait(60)
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert len(gone) == 1
    assert not alive


def test_an_index_of_many_parts_is_copied_whole(tmp_path: Path) -> None:
    old, new, count = tmp_path / "old", tmp_path / "new", 300_000
    source = open_environment(old)
    blocks = source.open_db(BLOCKS_DB)
    with source.begin(write=True, db=blocks) as writing:
        for number in range(count):
            writing.put(number.to_bytes(KEY_SIZE, "big"), b"%040d" % number, append=True)
    source.close()
    assert count * (KEY_SIZE + 40) > 2 * index_copy._PART_BYTES
    assert index_copy.copy_entries(old, new) == ""
    target = lmdb.open(str(new), subdir=False, readonly=True, lock=False, max_dbs=MAX_DBS)
    with target.begin(db=target.open_db(BLOCKS_DB, create=False)) as reading:
        assert reading.stat()["entries"] == count
        assert reading.get((count - 1).to_bytes(KEY_SIZE, "big")) == b"%040d" % (count - 1)
    target.close()


def test_an_index_of_which_nothing_more_comes_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "old")  # a process that opens it waits
    monkeypatch.setattr(index_copy, "PART_SECONDS", 0.05)
    told = index_copy.copy_entries(tmp_path / "old", tmp_path / "new")
    assert told == "nothing of it was copied for 0.05 s, after 0 B"


@pytest.mark.parametrize("name", ["running", "lock", "index-7.lmdb"])
def test_what_is_in_the_way_of_a_file_is_named(directory: Path, name: str) -> None:
    (directory / name).unlink(missing_ok=True)
    (directory / name).mkdir()
    with pytest.raises(ConfigError, match=rf"state_dir .*{name} in it is not a plain file; remove it"):
        start(directory)
    (directory / name).rmdir()
    (directory / name).symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="not a plain file"):
        start(directory)
    (directory / name).unlink()
    assert start(directory)[1] == 10


def test_a_state_directory_of_somebody_else_is_refused(directory: Path) -> None:
    os.chown(directory, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to user nobody"):
        start(directory)


def test_a_lock_file_without_its_index_is_cleared_away(directory: Path) -> None:
    (directory / "index-9.lmdb-lock").touch()
    start(directory)
    assert names(directory) == ["format", "index-2.lmdb", "index-2.lmdb-lock", "lock", "running"]


def test_a_directory_of_before_is_taken_up_and_has_a_format_then(directory: Path) -> None:
    (directory / "format").unlink()
    assert start(directory)[1] == 10
    assert (directory / "format").read_text() == f"{state_format.FORMAT}\n"


def test_an_older_daemon_refuses_the_directory_of_a_newer_one_and_changes_nothing(directory: Path) -> None:
    (directory / "format").write_text(f"{state_format.FORMAT + 1}\n")
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(ConfigError) as refused:
        StateDirectory(directory)
    assert str(refused.value) == (
        f"state_dir {directory} cannot be used: a newer cachefsd has used it (its format is {state_format.FORMAT + 1}, "
        f"and this one knows {state_format.FORMAT}); install that version again, or choose another"
    )
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    memory = TierConfig(directory / "memory", 64 << 20, min_free=0, segment_size=1 << 20, policy="lru")
    assert str(refused.value) in list(config_check.problems(StoreConfig(directory, 1 << 20, memory, None)))


def test_a_format_that_is_no_number_is_refused_in_one_line(directory: Path) -> None:
    (directory / "format").write_text("?")
    with pytest.raises(ConfigError, match="holds no number; remove that file"):
        StateDirectory(directory)
