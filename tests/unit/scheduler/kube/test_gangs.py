"""Pods of one job find nodes that together hold the data, in whatever order kube-scheduler asks for them."""

import pytest
from cachefs_scheduler.kube.gangs import FORGOTTEN, PLAN_SECONDS, Gangs
from cachefs_scheduler.kube.pod_job import PodJob
from hypothesis import given
from hypothesis import strategies as st

from cachefs.scheduling_messages import Ask
from tests.advising import FakeAdvice

NODES = [f"n{number}" for number in range(6)]
JOB = "kube:training/job/train"


@pytest.fixture
def advice() -> FakeAdvice:
    return FakeAdvice({"n0": 1.0, "n1": 0.9, "n2": 0.8, "n3": 0.7})


def member(rank: int | None = None, ranks: int = 3, job: str = JOB) -> PodJob:
    return PodJob(Ask(job=job, dataset="imagenet", ranks=max(1, ranks)), ranks, rank)


def place(gangs: Gangs, advice: FakeAdvice, uid: str, pod: PodJob, offered: list[str], now: float = 0) -> str:
    ask = gangs.asked(pod, uid, now)
    return gangs.place(ask, uid, offered, advice, now).own


def test_numbered_pods_get_the_nodes_of_their_ranks(advice: FakeAdvice) -> None:
    gangs = Gangs()
    assert [place(gangs, advice, f"u{rank}", member(rank), NODES) for rank in (2, 0, 1)] == ["n2", "n0", "n1"]
    assert len(advice.assigned) == 1  # one plan for all of them


def test_pods_without_numbers_get_different_nodes_and_keep_them(advice: FakeAdvice) -> None:
    gangs = Gangs()
    first = [place(gangs, advice, uid, member(), NODES) for uid in "abc"]
    assert sorted(first) == ["n0", "n1", "n2"]
    assert [place(gangs, advice, uid, member(), NODES) for uid in "abc"] == first


def test_other_ranks_nodes_are_kept_free(advice: FakeAdvice) -> None:
    gangs = Gangs()
    ask = gangs.asked(member(0), "u0", 0)
    found = gangs.place(ask, "u0", NODES, advice, 0)
    assert found.own == "n0"
    assert found.others == {"n1", "n2"}
    gangs.seen(member(1), "u1", "n1", 1)
    assert gangs.place(ask, "u0", NODES, advice, 1).others == {"n2"}


def test_who_is_bound_elsewhere_changes_the_plan_around_him(advice: FakeAdvice) -> None:
    gangs = Gangs()
    place(gangs, advice, "u0", member(0), NODES)
    gangs.seen(member(0), "u0", "n1", 1)
    assert place(gangs, advice, "u1", member(1), NODES, 1) == "n0"
    assert advice.assigned[-1] == {0: "n1"}


def test_a_planned_node_that_is_full_is_replaced(advice: FakeAdvice) -> None:
    gangs = Gangs()
    place(gangs, advice, "u0", member(0), NODES)
    assert place(gangs, advice, "u1", member(1), ["n4", "n3"]) in ("n3", "n4")


def test_a_plan_is_made_anew_in_time(advice: FakeAdvice) -> None:
    gangs = Gangs()
    place(gangs, advice, "u0", member(0), NODES)
    advice.held["n5"] = 2.0
    assert place(gangs, advice, "u0", member(0), NODES, PLAN_SECONDS - 1) == "n0"
    assert place(gangs, advice, "u0", member(0), NODES, PLAN_SECONDS) == "n5"


def test_a_pod_that_takes_the_place_of_another_gets_its_rank(advice: FakeAdvice) -> None:
    gangs = Gangs()
    for uid in "abc":
        place(gangs, advice, uid, member(), NODES)
        gangs.seen(member(), uid, "", 0)
    gangs.seen(member(), "a", "n0", 1)
    gangs.gone(JOB, "a")
    assert gangs.nodes(JOB) == []
    assert place(gangs, advice, "d", member(), NODES, 2) == "n0"


def test_without_the_annotation_a_job_has_as_many_ranks_as_pods_were_seen(advice: FakeAdvice) -> None:
    gangs = Gangs()
    assert gangs.asked(member(0, ranks=0), "u0", 0).ranks == 1
    assert gangs.asked(member(5, ranks=0), "u5", 0).ranks == 6
    gangs.seen(member(7, ranks=0), "u7", "n0", 0)
    assert gangs.ranks(member(0, ranks=0)) == 8


def test_jobs_that_nobody_asks_for_are_forgotten_and_those_with_pods_are_not(advice: FakeAdvice) -> None:
    gangs = Gangs(most_jobs=2)
    gangs.asked(member(0, job="kube:a/job/old"), "u0", 0)
    gangs.seen(member(0, job="kube:a/job/lives"), "u1", "n1", 0)
    # A third one gets no plan, and its score as any pod, until there is room.
    assert gangs.asked(member(0, job="kube:a/job/new"), "u2", 1).ranks == 3
    assert len(gangs) == 2
    assert place(gangs, advice, "u2", member(0, job="kube:a/job/new"), NODES, 1) == ""
    assert place(gangs, advice, "u2", member(0, job="kube:a/job/new"), NODES, FORGOTTEN) == "n0"
    assert gangs.nodes("kube:a/job/lives") == ["n1"]


def test_pods_that_the_api_server_does_not_list_any_more_are_gone(advice: FakeAdvice) -> None:
    gangs = Gangs()
    gangs.seen(member(0), "u0", "n0", 0)
    gangs.seen(member(1), "u1", "n1", 0)
    gangs.keep_only({"u1"})
    assert gangs.nodes(JOB) == ["n1"]
    gangs.keep_only(set())
    assert len(gangs) == 0


def test_pods_alone_are_not_remembered(advice: FakeAdvice) -> None:
    gangs = Gangs()
    gangs.asked(member(0, ranks=1), "u0", 0)
    gangs.seen(member(0, ranks=1), "u0", "n0", 0)
    assert len(gangs) == 0


def test_a_rank_beyond_what_the_annotation_says_has_no_place(advice: FakeAdvice) -> None:
    gangs = Gangs()
    assert place(gangs, advice, "u9", member(9, ranks=2), NODES) == ""


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["gone", "asked", 0, 1, 2, 5])), max_size=40))
def test_pods_without_numbers_get_the_first_free_seats(steps: list[tuple[str, str | int]]) -> None:
    gangs = Gangs()
    gangs.seen(member(), "first", "n0", 0)  # so that the job stays
    seats = {"first": 0}
    for uid, step in steps:
        if step == "gone":
            gangs.gone(JOB, uid)
            seats.pop(uid, None)
        elif step == "asked":
            gangs.asked(member(), uid, 0)
            seats.setdefault(uid, next(number for number in range(99) if number not in seats.values()))
        else:
            gangs.asked(member(int(step)), uid, 0)
            seats[uid] = int(step)
        assert gangs._gangs[JOB].seats == seats
