"""What is done for jobs, from the pods as they are."""

import msgspec
import pytest

from cachefs_scheduler.kube import pod_jobs
from cachefs_scheduler.kube.gangs import PodGangs
from cachefs_scheduler.kube.kube_messages import ObjectMetadata, OwnerReference, Pod, PodSpec, PodStatus, SchedulingGate
from cachefs_scheduler.kube.pod_jobs import ENDED_SECONDS, REPEAT_SECONDS, SETTLE_SECONDS, PodJobs
from tests.advising import FakeAdvisor

OURS = SchedulingGate("cachefs.io/copy-slot")


@pytest.fixture
def advice() -> FakeAdvisor:
    found = FakeAdvisor({"n1": 1.0})
    found.go = set()
    return found


@pytest.fixture
def jobs(advice: FakeAdvisor) -> PodJobs:
    return PodJobs(advice, PodGangs())


def pod(
    name: str,
    node: str = "",
    *,
    gates: tuple[SchedulingGate, ...] = (OURS,),
    created: str = "",
    policy: str = "suspend",
) -> Pod:
    annotations = {"cachefs.io/dataset": "imagenet", "cachefs.io/policy": policy}
    metadata = ObjectMetadata(name, "team", f"uid-{name}", annotations=annotations, created=created)
    return Pod(metadata, PodSpec(node, [] if node else list(gates)), PodStatus("Pending"))


def opened(jobs: PodJobs, now: float) -> list[str]:
    return [gate.pod.name for gate in jobs.collect_actions(now).gates]


def test_who_is_older_asks_first_after_those_that_have_slots(jobs: PodJobs, advice: FakeAdvisor) -> None:
    """As a replica finds them that begins to lead, in whatever order they are listed."""
    found = [
        pod("young", created="2026-01-03T00:00:00Z"), pod("old", created="2026-01-01T00:00:00Z"),
        pod("let-in", gates=(), created="2026-01-04T00:00:00Z"), pod("runs", "n1", created="2026-01-05T00:00:00Z"),
    ]  # fmt: skip
    jobs.replace_pods(found, 0)
    jobs.begin_leading(0)
    jobs.collect_actions(1)
    assert advice.told == [
        ("placed", "kube:team/pod/runs", ("n1",)), ("admit", "kube:team/pod/let-in"),
        ("admit", "kube:team/pod/old"), ("admit", "kube:team/pod/young"),
    ]  # fmt: skip


def test_a_replica_that_has_just_begun_waits_for_the_daemons(jobs: PodJobs, advice: FakeAdvisor) -> None:
    held, advice.held, advice.go = advice.held, {}, None
    jobs.replace_pods([pod("a")], 0)
    jobs.begin_leading(0)
    assert opened(jobs, 1) == []
    assert advice.told == []
    advice.held = held
    assert opened(jobs, 5) == ["a"]


def test_where_no_daemon_says_anything_jobs_go_at_last(jobs: PodJobs, advice: FakeAdvisor) -> None:
    advice.held, advice.go = {}, None
    jobs.replace_pods([pod("a")], 0)
    jobs.begin_leading(0)
    assert opened(jobs, SETTLE_SECONDS - 1) == []
    assert opened(jobs, SETTLE_SECONDS + 2) == ["a"]


def test_gates_are_opened_once_and_again_if_that_did_not_work(jobs: PodJobs, advice: FakeAdvisor) -> None:
    jobs.update_pod(pod("a"), 0)
    advice.go = None
    assert opened(jobs, 1) == ["a"]
    jobs.admissions_changed()
    assert opened(jobs, 4) == []
    jobs.note_failed_gate("uid-a", 4)
    assert opened(jobs, 4 + pod_jobs._RETRY_SECONDS + pod_jobs._SCAN_SECONDS) == ["a"]
    # The answer was lost, and no news came.
    assert opened(jobs, 60) == ["a"]
    jobs.update_pod(pod("a", gates=()), 61)
    assert opened(jobs, 100) == []


def test_what_waits_and_what_runs_is_told_again_in_time(jobs: PodJobs, advice: FakeAdvisor) -> None:
    jobs.update_pod(pod("waits"), 0)
    jobs.update_pod(pod("runs", "n1"), 0)
    jobs.collect_actions(1)
    told = list(advice.told)
    jobs.collect_actions(REPEAT_SECONDS)
    assert advice.told == told
    jobs.collect_actions(REPEAT_SECONDS + 3)
    assert advice.told == told * 2


def test_a_job_ends_when_no_pod_has_taken_the_place_of_its_last(jobs: PodJobs, advice: FakeAdvisor) -> None:
    jobs.update_pod(pod("a", "n1"), 0)
    jobs.collect_actions(1)
    jobs.remove_pod("uid-a", 10)
    jobs.collect_actions(10 + ENDED_SECONDS - 3)
    assert advice.told[-1][0] == "placed"
    jobs.collect_actions(10 + ENDED_SECONDS + 1)
    assert advice.told[-1] == ("ended", "kube:team/pod/a")
    assert len(jobs) == 0


def test_a_pod_that_has_finished_counts_as_gone_though_it_is_listed(jobs: PodJobs, advice: FakeAdvisor) -> None:
    found = pod("a", "n1")
    jobs.update_pod(found, 0)
    jobs.collect_actions(1)
    jobs.replace_pods([Pod(found.metadata, found.spec, PodStatus("Succeeded"))], 2)
    jobs.collect_actions(2 + ENDED_SECONDS)
    assert advice.told[-1] == ("ended", "kube:team/pod/a")


def test_a_job_whose_pods_are_made_again_keeps_its_slot(jobs: PodJobs, advice: FakeAdvisor) -> None:
    first, second = pod("a", "n1"), pod("a")
    jobs.update_pod(first, 0)
    jobs.collect_actions(1)
    jobs.remove_pod("uid-a", 5)
    jobs.update_pod(second, 6)
    assert opened(jobs, 7) == ["a"]
    assert not any(told[0] == "admit" for told in advice.told)


def test_clones_are_asked_for_and_not_held_up(jobs: PodJobs, advice: FakeAdvisor) -> None:
    jobs.update_pod(pod("a", gates=(), policy="clone"), 0)
    assert jobs.collect_actions(1).events == []
    assert advice.told == [("admit", "kube:team/pod/a")]


def test_the_same_name_in_two_namespaces_is_two_jobs(jobs: PodJobs, advice: FakeAdvisor) -> None:
    one = pod("a", "n1")
    other = Pod(ObjectMetadata("a", "other", "uid-other", annotations=one.metadata.annotations), PodSpec("n1"))
    jobs.replace_pods([one, other], 0)
    jobs.collect_actions(1)
    assert {told[1] for told in advice.told} == {"kube:team/pod/a", "kube:other/pod/a"}
    jobs.replace_pods([other], 2)
    assert len(jobs) == 1
    jobs.drop_ended(2 + ENDED_SECONDS)  # as a replica does that does not lead: its own queue must not keep the job
    assert advice.told[-1] == ("ended", "kube:team/pod/a")


def test_an_error_about_one_job_keeps_no_job_waiting(jobs: PodJobs, advice: FakeAdvisor) -> None:
    jobs.replace_pods([pod("a"), pod("b")], 0)
    advice.broken = RuntimeError("wrong")
    assert sorted(opened(jobs, 1)) == ["a", "b"]


def test_what_was_known_before_and_has_no_pods_any_more_ends(jobs: PodJobs, advice: FakeAdvisor) -> None:
    advice.remembered = ["kube:team/pod/dead", "slurm:1"]
    jobs.replace_pods([], 0)
    jobs.begin_leading(0)
    jobs.collect_actions(1)
    assert advice.told == []
    jobs.collect_actions(1 + ENDED_SECONDS)
    assert advice.told == [("ended", "kube:team/pod/dead")]


def test_a_replica_that_leads_no_more_forgets_what_has_ended(jobs: PodJobs, advice: FakeAdvisor) -> None:
    jobs.replace_pods([pod("a", "n1")], 0)
    jobs.begin_leading(0)
    jobs.collect_actions(1)
    jobs.replace_pods([], 2)  # another one leads
    jobs.drop_ended(3 + ENDED_SECONDS)
    assert ("ended", "kube:team/pod/a") in advice.told


def test_a_job_of_many_pods_is_not_counted_once_for_each(
    jobs: PodJobs, advice: FakeAdvisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 5,000 pods took a second each time that one of them changed.
    owner = OwnerReference("Job", "train", controller=True)
    pods = [pod(f"p{number}") for number in range(300)]
    pods = [
        msgspec.structs.replace(one, metadata=msgspec.structs.replace(one.metadata, owners=[owner])) for one in pods
    ]
    jobs.replace_pods(pods, 0)
    counted: list[str] = []
    ranks = PodGangs.known_ranks
    monkeypatch.setattr(
        PodGangs, "known_ranks", lambda gangs, pod: counted.append(pod.request.job) or ranks(gangs, pod)
    )
    asked: list[int] = []
    admit = advice.admit
    monkeypatch.setattr(advice, "admit", lambda ask: asked.append(ask.ranks) or admit(ask))
    jobs.collect_actions(1)
    assert (asked, len(counted)) == ([300], 1)


def test_slots_that_are_freed_are_taken_by_those_that_wait_at_the_next_look(jobs: PodJobs, advice: FakeAdvisor) -> None:
    jobs.replace_pods([pod("a"), pod("b")], 0)
    assert opened(jobs, 1) == []
    advice.go = {"kube:team/pod/b"}
    for _ in range(1000):  # a thousand have ended at once
        jobs.admissions_changed()
    assert opened(jobs, 1.1) == ["b"]


def test_of_many_jobs_some_are_looked_at_at_a_time_and_none_is_left_out(jobs: PodJobs, advice: FakeAdvisor) -> None:
    count = 2 * pod_jobs.MAX_JOBS_PER_PASS + 10
    jobs.replace_pods([pod(f"p{number}") for number in range(count)], 0)
    advice.go = {f"kube:team/pod/p{number}" for number in range(count)}
    found = [jobs.collect_actions(1) for _ in range(3)]
    assert [due.has_more for due in found] == [True, True, False]
    assert len({gate.pod.name for due in found for gate in due.gates}) == count
    assert len(found[0].gates) == pod_jobs.MAX_JOBS_PER_PASS
