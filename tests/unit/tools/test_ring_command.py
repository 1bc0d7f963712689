"""What `cachectl ring` makes of a cluster, and of changes that somebody thinks of."""

import subprocess
import sys

import click
import msgspec
import pytest

from cachefs.cluster_messages import ClusterStatus, MemberStatus
from cachefs.errors import ConfigError, NotFound
from cachefs_tools.cachectl.ring_tables import changed_members, diff_output, shares_output


def member(number: int, name: str, state: str = "active", weight: float = 2.0, zone: str = "") -> MemberStatus:
    return MemberStatus(
        f"{number:016x}",
        "",
        name,
        "10.0.0.1",
        7380,
        7381,
        zone,
        state,
        state == "active",
        weight,
        0.0,
        1 << 30,
        3 << 30,
    )


def cluster(*members: MemberStatus, replicas: int = 1) -> ClusterStatus:
    return ClusterStatus(
        "c", "etcd", members[0].id if members else "", 7, 1.0, "", replicas=replicas, members=[*members]
    )


FOUND = cluster(member(1, "one"), member(2, "two"), member(3, "three", weight=4.0), member(9, "gone", "away"))


def weights(*changes: str) -> dict[str, float]:
    return {one.id.lstrip("0"): one.weight for one in changed_members(FOUND, changes)}


def test_shares_of_those_that_place() -> None:
    document, lines = shares_output(FOUND)
    assert [one["name"] for one in document["nodes"]] == ["one", "two", "three"]
    assert [one["share"] for one in document["nodes"]] == [0.25, 0.25, 0.5]
    assert sum(one["homes"] for one in document["nodes"]) == pytest.approx(1)
    texts = [line for line in lines if isinstance(line, str)]
    assert texts[0] == "ring epoch 7, 3 nodes, 1 copy of each block"
    assert texts[-1] == "gone is away and is the home of no block"


def test_changes_that_somebody_thinks_of() -> None:
    assert weights("+four:2.5") == {"1": 2, "2": 2, "3": 4, "four": 2.5}
    assert weights("+four", "-one", f"-{2:016x}") == {"3": 4, "four": pytest.approx(8 / 3)}
    assert weights("+four:1:east", "-four") == weights()
    assert changed_members(FOUND, ["+four:1:east"])[-1].zone == "east"


def test_what_moves_is_the_part_of_who_joins() -> None:
    document, lines = diff_output(FOUND, ["+four:8"])
    assert document["moved"] == pytest.approx(0.5, abs=0.01)
    assert document["least"] == pytest.approx(document["moved"], rel=0.02)
    assert "50." in str(next(lines)) or "49." in str(document["moved"])
    by_name = {one["name"]: one for one in document["nodes"]}
    assert by_name["three"]["gives"] == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("four", "not a change"), ("", "not a change"), ("+", "not a joining node"), ("+four:0", "not a joining node"),
        ("+four:nan", "not a joining node"), ("+four:much", "not a joining node"), ("+one", "already"),
        (f"+{1:016x}", "already"), ("+four:inf", "not a joining node"),
    ],
)  # fmt: skip
def test_what_is_no_change_is_refused(change: str, message: str) -> None:
    with pytest.raises(ConfigError if message == "already" else click.UsageError, match=message):
        changed_members(FOUND, [change])


def test_a_node_that_is_not_there_cannot_leave() -> None:
    for name in ("five", "gone", ""):
        with pytest.raises(NotFound, match="no node of the ring is called"):
            changed_members(FOUND, [f"-{name}"])
    with pytest.raises(NotFound, match="2 nodes have the name one; use an id"):
        changed_members(cluster(member(1, "one"), member(2, "one")), ["-one"])


def test_all_may_leave_and_without_a_cluster_there_is_no_ring() -> None:
    document, _ = diff_output(FOUND, ["-one", "-two", "-three"])
    assert (document["moved"], document["least"]) == (1, 0)
    with pytest.raises(NotFound, match="no cluster"):
        shares_output(cluster())


def test_cachectl_starts_without_numpy() -> None:
    program = "import sys, cachefs_tools.cachectl; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=20).returncode == 0


def test_with_two_copies_the_hot_datasets_are_named() -> None:
    found = msgspec.structs.replace(cluster(member(1, "a"), member(2, "b"), replicas=2), hot=["imagenet"])
    texts = [text for text in shares_output(found)[1] if isinstance(text, str)]
    assert texts[:2] == ["ring epoch 7, 2 nodes, 1 copy of each block", "2 copies of hot datasets: imagenet"]
