"""Who held what, on disk and on the wire."""

import dataclasses
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs_cluster.placement.holder_files import HolderFiles, decode_state, differ, digest_of, encode_state
from cachefs_cluster.placement.holders import FormerHolders, HolderState

IDS = ("0" * 16, "1" * 16)
KNOWN = HolderState(7, "train", 3, IDS, np.array([0, 1, 1, 0, 65535], np.uint16))


LATER = dataclasses.replace(KNOWN, next_holders=np.array([1, 1, 1, 0, 0], np.uint16))


def same(one: HolderState | None, other: HolderState) -> bool:
    return one is not None and encode_state(one) == encode_state(other)


def test_what_is_saved_is_found_again(tmp_path: Path) -> None:
    files = HolderFiles(tmp_path / "holders")
    assert files.load("a" * 32, 5) is None
    files.save("a" * 32, dataclasses.replace(KNOWN, epoch=2))
    for known in (KNOWN, LATER):
        files.save("a" * 32, known)
        assert same(files.load("a" * 32, 5), known)
    assert files.load("a" * 32, 6) is None, "the snapshot has other blocks"
    files.remove_unwanted(lambda snapshot: snapshot == "b" * 32)
    assert list((tmp_path / "holders").iterdir()) == []


def test_who_held_what_before_is_told_and_not_kept(tmp_path: Path) -> None:
    held = KNOWN.holders[::-1].copy()
    former = FormerHolders(("0" * 16,), held, 100.0, (KNOWN.holders, held))
    told = decode_state(encode_state(dataclasses.replace(KNOWN, former=former), 130.0), 5, 1030.0).former
    assert told is not None
    assert (told.ids, told.changed_at) == (former.ids, 1000.0)
    assert (told.holders == held).all()
    assert [one.tolist() for one in told.other_holders] == [KNOWN.holders.tolist(), held.tolist()]
    files = HolderFiles(tmp_path)
    files.save("a" * 32, dataclasses.replace(KNOWN, former=former))
    assert same(files.load("a" * 32, 5), KNOWN)


def test_nodes_that_count_others_do_not_differ_about_who_holds_what() -> None:
    mine = digest_of(KNOWN)
    assert not differ(mine, digest_of(LATER))
    assert differ(mine, digest_of(dataclasses.replace(KNOWN, holders=KNOWN.holders[::-1])))
    assert not differ(
        mine, digest_of(dataclasses.replace(KNOWN, ids=("0" * 16, "2" * 16), holders=KNOWN.holders[::-1]))
    )


def test_a_damaged_file_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = HolderFiles(tmp_path)
    files.save("a" * 32, KNOWN)
    (path,) = tmp_path.iterdir()
    for damaged in (b"", b"nonsense", path.read_bytes()[:-3], bytes(3 << 20)):
        path.write_bytes(damaged)
        assert files.load("a" * 32, 5) is None
        assert str(path) in caplog.text


def test_what_no_node_says_is_refused() -> None:
    form = msgspec.msgpack.decode(
        encode_state(dataclasses.replace(LATER, former=FormerHolders(IDS, KNOWN.holders, 0.0)))
    )
    for number, wrong in (
        (5, b"x"),
        (0, -1),
        (1, "x" * 1000),
        (1, "a\nb"),
        (2, -1),
        (3, ["0"]),
        (3, [IDS[1], IDS[0]]),
        (4, b"x"),
        (6, [b"x"]),
        (6, form[6] * 4),
        (7, ["0"]),
        (8, -1.0),
        (8, math.inf),
    ):
        changed = list(form)
        changed[number] = wrong
        with pytest.raises(ValueError, match=r".+"):
            decode_state(msgspec.msgpack.encode(changed), 5)
    for blocks in (0, 4, 6, 1 << 20):
        with pytest.raises(ValueError, match="not for"):
            decode_state(encode_state(KNOWN), blocks)


@given(st.binary(max_size=200))
def test_garbage_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        decode_state(raw, 5)


def test_nodes_that_agree_have_one_digest() -> None:
    assert digest_of(KNOWN) == digest_of(dataclasses.replace(KNOWN, count=1))
    other = KNOWN.holders.copy()
    other[0] = 1
    assert digest_of(KNOWN) != digest_of(dataclasses.replace(KNOWN, holders=other))
    assert digest_of(KNOWN) != digest_of(dataclasses.replace(KNOWN, ids=("0" * 16, "2" * 16)))
