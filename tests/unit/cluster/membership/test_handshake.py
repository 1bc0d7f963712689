"""What a node makes of requests by their greeting."""

import dataclasses

import pytest

from cachefs_cluster.membership.handshake import Greeting, Verdict, explain_verdict, judge_greeting
from cachefs_cluster.membership.view import PROTOCOL, ClusterView
from tests.members import member_id, member_record

VIEW = ClusterView(7, member_id(1), (member_record(1), member_record(2)), (), "etcd", "", 0.0)
GREETING = Greeting("c", member_id(2), member_id(1), member_record(1).incarnation, 7)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, Verdict.WELCOME),
        ({"incarnation": ""}, Verdict.WELCOME),
        ({"epoch": 6}, Verdict.OLD_EPOCH),
        ({"epoch": 8}, Verdict.NEWER_EPOCH),
        ({"epoch": 8, "sender": member_id(9)}, Verdict.NEWER_EPOCH),
        ({"sender": member_id(9)}, Verdict.NOT_A_MEMBER),
        ({"addressee": member_id(2)}, Verdict.OTHER_NODE),
        ({"incarnation": "f" * 16}, Verdict.OTHER_INCARNATION),
        ({"cluster": "d"}, Verdict.OTHER_CLUSTER),
        ({"protocol": PROTOCOL + 1}, Verdict.OTHER_PROTOCOL),
    ],
)
def test_verdicts(change: dict[str, object], verdict: Verdict) -> None:
    greeting = dataclasses.replace(GREETING, **change)  # type: ignore[arg-type]
    assert judge_greeting(VIEW, "c", greeting) is verdict
    assert verdict.is_accepted == (explain_verdict(verdict, VIEW, "c", greeting) == "")


def test_lists_are_the_same_or_not() -> None:
    listed = dataclasses.replace(VIEW, source="static")
    assert judge_greeting(listed, "c", GREETING) is Verdict.WELCOME
    assert judge_greeting(listed, "c", dataclasses.replace(GREETING, sender=member_id(9))) is Verdict.NOT_A_MEMBER
    other = dataclasses.replace(GREETING, epoch=8)
    assert judge_greeting(listed, "c", other) is Verdict.OTHER_LIST
    assert "make cluster.nodes the same" in explain_verdict(Verdict.OTHER_LIST, listed, "c", other)


def test_a_node_of_no_cluster_serves_nobody() -> None:
    assert judge_greeting(ClusterView(), "c", GREETING) is Verdict.OTHER_CLUSTER
    assert "a node that is in no cluster" in explain_verdict(Verdict.OTHER_CLUSTER, ClusterView(), "c", GREETING)
