"""Following a daemon that restarts: the index and the directories it has now, or those it had where that fails."""

import os
from pathlib import Path

import lmdb
import pytest

from cachefs.block import MEMORY, SSD, BlockLocation, piece_checksums
from cachefs.errors import CachefsError
from cachefs.index import BLOCKS_DB
from cachefs.messages import NodeView
from cachefs.mount.node_view import TierView

KEY = bytes(20)


def index(path: Path, segment: int) -> None:
    """A new file whose one block is in *segment*."""
    fresh = path.with_suffix(".new")
    with lmdb.open(str(fresh), subdir=False, max_dbs=8, map_size=1 << 20) as env:
        location = BlockLocation(MEMORY, segment, 0, 1, piece_checksums(KEY, b"x"))
        with env.begin(write=True) as txn:
            txn.put(KEY, location.pack(), db=env.open_db(BLOCKS_DB, txn))
    os.rename(fresh, path)


def view(path: Path, **tiers: str) -> NodeView:
    return NodeView(
        instance="i", index=str(path), tiers=tiers, datasets=[], capacity=0, used=0, read_deadline=60.0
    )  # fmt: skip


def segment_of(tiers: TierView) -> int:
    found = tiers.index.get(KEY)
    assert found is not None
    return found.segment


def test_an_index_in_the_place_of_another_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "index"
    index(path, 1)
    tiers = TierView(view(path, memory="/m"))
    opened = tiers.index
    assert not tiers.adopt_view(view(path, memory="/m"))
    assert tiers.index is opened
    index(path, 2)
    assert segment_of(tiers) == 1
    assert not tiers.adopt_view(view(path, memory="/m"))
    assert segment_of(tiers) == 2
    index(tmp_path / "other", 3)
    tiers.adopt_view(view(tmp_path / "other", memory="/m"))
    assert segment_of(tiers) == 3


def test_while_no_index_is_there_no_block_is_found(tmp_path: Path) -> None:
    path = tmp_path / "index"
    index(path, 1)
    tiers = TierView(view(path, memory="/m"))
    path.unlink()
    for _ in range(2):
        with pytest.raises(CachefsError, match="cannot be read"):
            tiers.adopt_view(view(path, memory="/m"))
        assert tiers.index.get(KEY) is None
    index(path, 2)
    tiers.adopt_view(view(path, memory="/m"))
    assert segment_of(tiers) == 2


def test_a_tier_that_moved_is_told(tmp_path: Path) -> None:
    index(tmp_path / "index", 1)
    tiers = TierView(view(tmp_path / "index", memory="/m"))
    assert tiers.directories == {MEMORY: Path("/m")}
    assert tiers.adopt_view(view(tmp_path / "index", memory="/m", ssd="/s"))
    assert tiers.directories == {MEMORY: Path("/m"), SSD: Path("/s")}


def test_while_the_new_index_cannot_be_read_the_old_one_is(tmp_path: Path) -> None:
    index(tmp_path / "index", 1)
    tiers = TierView(view(tmp_path / "index", memory="/m"))
    with pytest.raises(CachefsError, match="cannot be read"):
        tiers.adopt_view(view(tmp_path / "gone", memory="/n"))
    assert segment_of(tiers) == 1
    assert tiers.directories == {MEMORY: Path("/m")}


def test_an_index_that_is_not_there_yet_is_opened_when_it_is(tmp_path: Path) -> None:
    path = tmp_path / "index"
    with pytest.raises(CachefsError, match="cannot be read"):
        TierView(view(path, memory="/m"))
    tiers = TierView(view(path, memory="/m"), needs_index=False)
    with pytest.raises(CachefsError, match="cannot be read"):
        tiers.adopt_view(view(path, memory="/m"))
    assert tiers.index.get(KEY) is None
    assert not tiers.index.is_open
    assert tiers.index.owner != os.getuid()
    index(path, 1)
    assert tiers.adopt_view(view(path, memory="/m"))  # since the segments have an owner now
    assert tiers.index.owner == os.getuid()
    assert segment_of(tiers) == 1
