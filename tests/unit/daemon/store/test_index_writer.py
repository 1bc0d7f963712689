"""The index as its writer sees it."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cachefs_daemon.store.index_writer import IndexWriter

from cachefs.block import MEMORY, Location
from tests.blockstore import key_of

PLACE = Location(MEMORY, 0, 4096, 1000, bytes(8))
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
    assert index.count() == len(OLD)
    portions = list(index.portions(most))
    assert [len(portion) for portion in portions[:-1]] == [most] * (len(portions) - 1)
    assert [key for portion in portions for key in portion] == OLD
    for key in OLD:
        index.delete(key)
    assert index.count() == 0
    assert list(index.portions(most)) == []


def test_what_changes_between_two_portions_loses_no_other_key(
    index: IndexWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(index, "commit", lambda: True)
        for key in NEW:
            index.put(key, PLACE)
        portions = index.portions(4)
        seen = next(portions)
    assert index.commit()
    for place, portion in enumerate(portions):
        seen += portion
        if OLD[2 * place] in seen:
            index.delete(OLD[2 * place])
            index.put(key_of(100 + place), PLACE)
            assert index.commit()
    assert set(seen) >= {*OLD, *NEW}
