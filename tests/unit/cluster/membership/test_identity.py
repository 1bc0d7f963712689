"""Ids stay with the state directory; incarnations are new each time."""

from pathlib import Path

import pytest

from cachefs.errors import ConfigError
from cachefs_cluster.membership.identity import load_identity, make_own_record
from cachefs_cluster.section import ClusterSection


def test_an_id_stays_and_an_incarnation_does_not(tmp_path: Path) -> None:
    first, second = load_identity(tmp_path), load_identity(tmp_path)
    assert first.id == second.id == (tmp_path / "node").read_text().strip()
    assert first.incarnation != second.incarnation
    assert [path.name for path in tmp_path.iterdir()] == ["node"]


@pytest.mark.parametrize("content", ["", "x", "0123456789abcdeg", "0" * 100])
def test_a_damaged_id_is_said(tmp_path: Path, content: str) -> None:
    (tmp_path / "node").write_text(content)
    with pytest.raises(ConfigError, match="is damaged: it does not hold 16 hex digits"):
        load_identity(tmp_path)


def test_an_id_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        load_identity(tmp_path / "missing")
    (tmp_path / "node").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match="cannot be used"):
        load_identity(tmp_path)


def test_what_a_node_says_of_itself(tmp_path: Path) -> None:
    identity = load_identity(tmp_path)
    section = ClusterSection(membership="etcd", name="n", listen="[::]:7000", advertise="fd00::1", zone="z")
    found = make_own_record(section, identity, 6 << 30, 2 << 30)
    assert (found.id, found.name, found.address, found.control_port) == (identity.id, "n", "[fd00::1]:7000", 7001)
    assert (found.memory, found.ssd, found.weight, found.state) == (6 << 30, 2 << 30, 8.0, "joining")
    assert make_own_record(section.model_copy(update={"weight": 3.0}), identity, 1, 0).weight == 3.0
