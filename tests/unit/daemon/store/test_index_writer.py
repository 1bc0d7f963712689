"""The index as its writer sees it."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb
import pytest

from cachefs.block import MEMORY, BlockLocation
from cachefs_daemon.store import index_writer
from cachefs_daemon.store.index_writer import IndexWriter
from tests.blockstore import key_of

PLACE = BlockLocation(MEMORY, 0, 4096, 1000, bytes(8))
OLD = sorted(key_of(number) for number in range(20))
NEW = [key_of(number) for number in range(20, 30)]


@pytest.fixture
def index(root: Path) -> Iterator[IndexWriter]:
    with closing(IndexWriter(root / "index")) as made:
        for key in OLD:
            made.put(key, PLACE)
        assert made.commit()
        yield made


@pytest.mark.parametrize("most", [1, 7, 20, 100])
def test_keys_come_in_portions(index: IndexWriter, most: int) -> None:
    assert index.count_keys() == len(OLD)
    portions = list(index.key_batches(most))
    assert [len(portion) for portion in portions[:-1]] == [most] * (len(portions) - 1)
    assert [key for portion in portions for key in portion] == OLD
    for key in OLD:
        index.delete(key)
    assert index.count_keys() == 0
    assert list(index.key_batches(most)) == []


def test_what_changes_between_two_portions_loses_no_other_key(
    index: IndexWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(index, "commit", lambda: True)
        for key in NEW:
            index.put(key, PLACE)
        portions = index.key_batches(4)
        seen = next(portions)
    assert index.commit()
    for place, portion in enumerate(portions):
        seen += portion
        if OLD[2 * place] in seen:
            index.delete(OLD[2 * place])
            index.put(key_of(100 + place), PLACE)
            assert index.commit()
    assert set(seen) >= {*OLD, *NEW}


class ReadOnly:
    """An environment of LMDB whose disk is full."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def begin(self, **options: Any) -> Any:
        if options.get("write"):
            raise lmdb.DiskError("No space left on device")
        return self._env.begin(**options)


def test_blocks_that_come_and_go_while_nothing_can_be_committed_do_not_add_up(
    index: IndexWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(index, "_env", ReadOnly(index._env))
        index.put(NEW[0], PLACE)
        assert not index.commit()
        for _ in range(3):
            for key in NEW[1:]:
                index.put(key, PLACE)
                index.delete(key)
        index.delete(OLD[0])
        assert len(index._pending) == 2, "the block that is here, and the one of which the file must still learn"
        assert index.get(NEW[1]) is None
    index._retry_at = 0.0
    assert index.commit()
    assert index.get(NEW[0]) == PLACE
    assert index.get(OLD[0]) is None
    assert index.count_keys() == len(OLD)


def test_no_change_is_lost_whatever_a_commit_fails_of(index: IndexWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(index_writer, "seal_location", out_of_memory)
        index.put(NEW[0], PLACE)
        assert not index.commit()
    index._retry_at = 0.0
    assert index.commit()
    assert NEW[0] in dict(index.committed_entries())
    assert index._committer.is_alive()


def test_who_looks_up_while_changes_are_committed_misses_none(index: IndexWriter) -> None:
    key, over, missed = NEW[0], threading.Event(), []
    index.put(key, PLACE)

    def look() -> None:
        while not over.is_set():
            if index.get(key) is None:
                missed.append(key)

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(200):
        index.put(key, PLACE)
        index.commit()
    over.set()
    looking.join()
    assert not missed
