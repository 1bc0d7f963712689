"""Pods of one job find nodes that together hold the data, in whatever order kube-scheduler asks for them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.scheduling_messages import PlacementRequest
from cachefs_scheduler.kube.gangs import FORGET_SECONDS, PLAN_SECONDS, PodGangs
from cachefs_scheduler.kube.pod_job import PodJob
from tests.advising import FakeAdvisor

NODES = [f"n{number}" for number in range(6)]
JOB = "kube:training/job/train"


@pytest.fixture
def advice() -> FakeAdvisor:
    return FakeAdvisor({"n0": 1.0, "n1": 0.9, "n2": 0.8, "n3": 0.7})


def member(rank: int | None = None, ranks: int = 3, job: str = JOB) -> PodJob:
    return PodJob(PlacementRequest(job=job, dataset="imagenet", ranks=max(1, ranks)), ranks, rank)


def place(gangs: PodGangs, advice: FakeAdvisor, uid: str, pod: PodJob, offered: list[str], now: float = 0) -> str:
    ask = gangs.note_request(pod, uid, now)
    return gangs.plan_node(ask, uid, offered, advice, now).node


def test_numbered_pods_get_the_nodes_of_their_ranks(advice: FakeAdvisor) -> None:
    gangs = PodGangs()
    assert [place(gangs, advice, f"u{rank}", member(rank), NODES) for rank in (2, 0, 1)] == ["n2", "n0", "n1"]
    assert len(advice.assigned) == 1  # one plan for all of them


def test_pods_without_numbers_get_different_nodes_and_keep_them(advice: FakeAdvisor) -> None:
    gangs = PodGangs()
    first = [place(gangs, advice, uid, member(), NODES) for uid in "abc"]
    assert sorted(first) == ["n0", "n1", "n2"]
    assert [place(gangs, advice, uid, member(), NODES) for uid in "abc"] == first


def test_other_ranks_nodes_are_kept_free(advice: FakeAdvisor) -> None:
    gangs = PodGangs()
    ask = gangs.note_request(member(0), "u0", 0)
    found = gangs.plan_node(ask, "u0", NODES, advice, 0)
    assert found.node == "n0"
    assert found.other_nodes == {"n1", "n2"}
    gangs.note_pod(member(1), "u1", "n1", 1)
    assert gangs.plan_node(ask, "u0", NODES, advice, 1).other_nodes == {"n2"}


def test_who_is_bound_elsewhere_changes_the_plan_around_him(advice: FakeAdvisor) -> None:
    gangs = PodGangs()
    place(gangs, advice, "u0", member(0), NODES)
    gangs.note_pod(member(0), "u0", "n1", 1)
    assert place(gangs, advice, "u1", member(1), NODES, 1) == "n0"
    assert advice.assigned[-1] == {0: "n1"}


def test_a_planned_node_that_is_full_is_replaced(advice: FakeAdvisor) -> None:
    gangs = PodGangs()
    place(gangs, advice, "u0", member(0), NODES)
    assert place(gangs, advice, "u1", member(1), ["n4", "n3"]) in ("n3", "n4")


def test_a_plan_is_made_anew_in_time(advice: FakeAdvisor) -> None:
    gangs = PodGangs()
    place(gangs, advice, "u0", member(0), NODES)
    advice.held["n5"] = 2.0
    assert place(gangs, advice, "u0", member(0), NODES, PLAN_SECONDS - 1) == "n0"
    assert place(gangs, advice, "u0", member(0), NODES, PLAN_SECONDS) == "n5"


def test_a_pod_that_takes_the_place_of_another_gets_its_rank(advice: FakeAdvisor) -> None:
    gangs = PodGangs()
    for uid in "abc":
        place(gangs, advice, uid, member(), NODES)
        gangs.note_pod(member(), uid, "", 0)
    gangs.note_pod(member(), "a", "n0", 1)
    gangs.remove_pod(JOB, "a")
    assert gangs.bound_nodes(JOB) == []
    assert place(gangs, advice, "d", member(), NODES, 2) == "n0"


def test_without_the_annotation_a_job_has_as_many_ranks_as_pods_were_seen(advice: FakeAdvisor) -> None:
    gangs = PodGangs()
    assert gangs.note_request(member(0, ranks=0), "u0", 0).ranks == 1
    assert gangs.note_request(member(5, ranks=0), "u5", 0).ranks == 6
    gangs.note_pod(member(7, ranks=0), "u7", "n0", 0)
    assert gangs.known_ranks(member(0, ranks=0)) == 8


def test_jobs_that_nobody_asks_for_are_forgotten_and_those_with_pods_are_not(advice: FakeAdvisor) -> None:
    gangs = PodGangs(most_jobs=2)
    gangs.note_request(member(0, job="kube:a/job/old"), "u0", 0)
    gangs.note_pod(member(0, job="kube:a/job/lives"), "u1", "n1", 0)
    # A third one gets no plan, and its score as any pod, until there is room.
    assert gangs.note_request(member(0, job="kube:a/job/new"), "u2", 1).ranks == 3
    assert len(gangs) == 2
    assert place(gangs, advice, "u2", member(0, job="kube:a/job/new"), NODES, 1) == ""
    assert place(gangs, advice, "u2", member(0, job="kube:a/job/new"), NODES, FORGET_SECONDS) == "n0"
    assert gangs.bound_nodes("kube:a/job/lives") == ["n1"]


def test_pods_that_the_api_server_does_not_list_any_more_are_gone(advice: FakeAdvisor) -> None:
    gangs = PodGangs()
    gangs.note_pod(member(0), "u0", "n0", 0)
    gangs.note_pod(member(1), "u1", "n1", 0)
    gangs.keep_pods({"u1"})
    assert gangs.bound_nodes(JOB) == ["n1"]
    gangs.keep_pods(set())
    assert len(gangs) == 0


def test_pods_alone_are_not_remembered(advice: FakeAdvisor) -> None:
    gangs = PodGangs()
    gangs.note_request(member(0, ranks=1), "u0", 0)
    gangs.note_pod(member(0, ranks=1), "u0", "n0", 0)
    assert len(gangs) == 0


def test_a_rank_beyond_what_the_annotation_says_has_no_place(advice: FakeAdvisor) -> None:
    gangs = PodGangs()
    assert place(gangs, advice, "u9", member(9, ranks=2), NODES) == ""


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["gone", "asked", 0, 1, 2, 5])), max_size=40))
def test_pods_without_numbers_get_the_first_free_seats(steps: list[tuple[str, str | int]]) -> None:
    gangs = PodGangs()
    gangs.note_pod(member(), "first", "n0", 0)  # so that the job stays
    seats = {"first": 0}
    for uid, step in steps:
        if step == "gone":
            gangs.remove_pod(JOB, uid)
            seats.pop(uid, None)
        elif step == "asked":
            gangs.note_request(member(), uid, 0)
            seats.setdefault(uid, next(number for number in range(99) if number not in seats.values()))
        else:
            gangs.note_request(member(int(step)), uid, 0)
            seats[uid] = int(step)
        assert gangs._gangs[JOB].rank_by_pod == seats
