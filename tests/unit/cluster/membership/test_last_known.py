"""What a node knew last of its cluster: read again, and of no use where it is damaged or another's."""

from pathlib import Path

import pytest

from cachefs_cluster.membership.last_known import FILE_NAME, LastKnownCluster, load_last_known, save_last_known
from cachefs_cluster.membership.ring import Ring, ring_nodes
from tests.members import member_id, member_record

RECORDS = (member_record(1), member_record(2))
KNOWN = LastKnownCluster(member_id(1), 7, RECORDS, RECORDS)


def test_it_is_read_again(tmp_path: Path) -> None:
    assert load_last_known(tmp_path, member_id(1)) is None
    save_last_known(tmp_path, KNOWN)
    assert load_last_known(tmp_path, member_id(1)) == (
        Ring(7, ring_nodes(RECORDS)),
        {each.id: each for each in RECORDS},
    )
    assert load_last_known(tmp_path, member_id(2)) is None  # a copied file


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"me":"x","epoch":1,"ring":[{}],"records":[]}'])
def test_nonsense_is_ignored(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert load_last_known(tmp_path, member_id(1)) is None
    assert "cannot be used" in caplog.text
