"""Jobs with the policy `suspend` wait in a real Slurm for a slot of a copy; the service hears of jobs that run. Where a
part dies, Slurm goes on as it would without cachefs."""

import os
from collections.abc import Iterator

import pytest

from cachefs_scheduler.slurm.hint_file import age_and_lifetime
from tests.scheduler.slurm.hinted import HintedSlurm, hinted_slurm
from tests.waiting import until

READS = "--comment=cachefs:imagenet"
WAITS = "--comment=cachefs:imagenet,policy=suspend"
NO_HINT = "no hint for a job that reads imagenet"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HintedSlurm]:
    with hinted_slurm(tmp_path_factory.mktemp("s")) as hinted:
        yield hinted


@pytest.fixture
def hinted(started: HintedSlurm) -> Iterator[HintedSlurm]:
    """No jobs; imagenet is on two nodes, for one job at a time."""
    started.hold(imagenet={"n3": 1.0, "n4": 1.0})
    started.service.set_slots("imagenet", 1)
    yield started
    started.slurm.cancel_all()
    until(lambda: set(started.service.placed) <= started.service.ended, "the service knows that all jobs have ended")


def test_a_job_waits_until_a_slot_is_free(hinted: HintedSlurm) -> None:
    first, nodes = hinted.run_on(WAITS)
    assert nodes in (("n3",), ("n4",))
    second = hinted.slurm.submit_job(WAITS)
    until(lambda: f"slurm:{second}" in hinted.service.asks, "the service was asked")
    assert hinted.slurm.job_state(second)[::2] == ("PENDING", "BeginTime")
    hinted.cancel(first)
    assert hinted.nodes_of(second) in (("n3",), ("n4",))
    until(
        lambda: hinted.service.placed.get(f"slurm:{second}") == hinted.slurm.job_state(second)[1], "the service knows"
    )


def test_tasks_of_an_array_wait_one_by_one(hinted: HintedSlurm) -> None:
    hinted.service.set_slots("imagenet", 2)
    job = hinted.slurm.submit_job(WAITS, "--array=1-4")
    until(lambda: len(_running(hinted, job)) == 2, "two tasks run")
    until(lambda: sum(name.startswith(f"slurm:{job}_") for name in hinted.service.placed) == 2, "they are known")
    waiting = hinted.slurm.run_command("squeue", "--noheader", "--states=pending", f"--jobs={job}", "--format=%r")
    assert set(waiting.split()) == {"BeginTime"}
    hinted.slurm.run_command("scancel", _running(hinted, job)[0])
    until(lambda: f"{job}_3" in _running(hinted, job), "the third one runs")


def test_a_begin_time_of_the_user_stays(hinted: HintedSlurm) -> None:
    job = hinted.slurm.submit_job(WAITS, "--begin=now+3600")
    begin = _begin(hinted, job)
    other, _ = hinted.run_on(WAITS)
    # It runs, so jobs have been looked at since.
    assert _begin(hinted, job) == begin
    hinted.cancel(other)


def test_a_job_that_shrinks_is_told_of(hinted: HintedSlurm) -> None:
    job, nodes = hinted.run_on("--nodes=2", READS)
    until(lambda: hinted.service.placed.get(f"slurm:{job}") == nodes, "the service knows")
    hinted.slurm.run_command("scontrol", "update", f"JobId={job}", "NumNodes=1")
    until(lambda: hinted.service.placed[f"slurm:{job}"] == nodes[:1], "the service knows that it is smaller")
    assert hinted.service.resized.count(f"slurm:{job}") == 1


def test_a_job_that_grows_is_told_of(hinted: HintedSlurm) -> None:
    """As Slurm has it: another job gives its nodes to the one that is to grow."""
    job, nodes = hinted.run_on("--ntasks=4", READS)
    until(lambda: hinted.service.placed.get(f"slurm:{job}") == nodes, "the service knows")
    slurm = hinted.slurm
    give = "cd $0 && scontrol update JobId=$SLURM_JOB_ID NumNodes=0"  # which leaves a script there
    slurm.run_command("salloc", "--ntasks=4", f"--dependency=expand:{job}", "sh", "-c", give, str(slurm.work))
    until(lambda: len(hinted.service.placed[f"slurm:{job}"]) == 2, "the service knows that it is larger")
    assert set(nodes) < set(hinted.service.placed[f"slurm:{job}"])
    assert hinted.service.resized.count(f"slurm:{job}") == 1


def test_jobs_that_are_held_are_released_where_the_service_is_silent_for_long(hinted: HintedSlurm) -> None:
    hinted.stop_hint()
    hinted.start_hint({"wait": "hold", "hints_last": 3})
    until(lambda: "wait hold" in hinted.hints.read_text(), "Lua knows")
    hinted.run_on(WAITS)
    second, array = hinted.slurm.submit_job(WAITS), hinted.slurm.submit_job(WAITS, "--array=1-40")
    own = hinted.slurm.submit_job(READS, "--hold")
    until(lambda: f"slurm:{second}" in hinted.service.asks, "the service was asked")
    assert "releases jobs itself" in hinted.release("--if-silent", "100s")
    hinted.kill_hint()
    assert hinted.slurm.job_state(second)[::2] == ("PENDING", "JobHeldUser")
    # At first the file is as young as if the program lived.
    until(lambda: (age_and_lifetime(hinted.hints) or (0.0,))[0] > 4, "the file is old")
    assert hinted.release("--if-silent", "4s") == "released 2 jobs"
    hinted.nodes_of(second)
    until(
        lambda: "JobHeldUser" not in hinted.slurm.run_command("squeue", "--noheader", f"--jobs={array}", "--format=%r"),
        "all",
    )
    assert hinted.slurm.job_state(own)[::2] == ("PENDING", "JobHeldUser")
    hinted.start_hint()
    until(lambda: "wait begin" in hinted.hints.read_text(), "Lua knows")


def test_held_jobs_are_released_where_the_administrator_wants_jobs_to_be_held(hinted: HintedSlurm) -> None:
    hinted.stop_hint()
    hinted.start_hint({"wait": "hold"})
    until(lambda: "wait hold" in hinted.hints.read_text(), "Lua knows")
    first, _ = hinted.run_on(WAITS)
    second = hinted.slurm.submit_job(WAITS)
    until(lambda: f"slurm:{second}" in hinted.service.asks, "the service was asked")
    assert hinted.slurm.job_state(second)[::2] == ("PENDING", "JobHeldUser")
    hinted.cancel(first)
    hinted.nodes_of(second)
    assert "held" not in hinted.slurm.run_command(
        "squeue", "--noheader", f"--jobs={second}", "--Format=AdminComment:200"
    )
    hinted.stop_hint()
    hinted.start_hint()
    until(lambda: "wait begin" in hinted.hints.read_text(), "Lua knows")


@pytest.mark.parametrize(
    "dies",
    [
        "both",
        pytest.param("service", marks=pytest.mark.cluster),
        pytest.param("hint command", marks=pytest.mark.cluster),
    ],
)
def test_where_a_part_dies_jobs_are_taken_hints_grow_old_and_who_waits_may_start(
    hinted: HintedSlurm, dies: str
) -> None:
    hinted.stop_hint()
    hinted.start_hint({"hints_last": 8, "wait_for": 16})
    hinted.hold(imagenet={"n4": 1.0})
    hinted.service.set_slots("imagenet", 0)
    until(lambda: _is_preferred(hinted), "Lua knows")
    said = hinted.slurm.controller_log().count(NO_HINT)
    assert hinted.run_on(READS)[1] == ("n4",)
    waiting = hinted.slurm.submit_job(WAITS)
    until(lambda: f"slurm:{waiting}" in hinted.service.asks, "the service was asked")
    if dies != "hint command":
        hinted.service.stop()
    if dies != "service":
        hinted.kill_hint()
    until(lambda: not _is_preferred(hinted), "hints are too old")
    hinted.run_on(READS)
    hinted.nodes_of(waiting)
    assert hinted.slurm.controller_log().count(NO_HINT) > said
    if dies != "hint command":
        hinted.service.start()
    if dies != "service":
        hinted.start_hint({"hints_last": 8, "wait_for": 16})
    until(lambda: _is_preferred(hinted), "hints are back")
    hinted.stop_hint()
    hinted.start_hint()


def _is_preferred(hinted: HintedSlurm) -> bool:
    """Does Lua have a new job prefer something?"""
    job = hinted.slurm.submit_job(READS, "--hold")
    shown = hinted.slurm.run_command("squeue", "--json")
    hinted.slurm.run_command("scancel", str(job))
    return '"prefer": "cachefs_imagenet_some"' in shown.partition(f'"job_id": {job},')[2].partition('"wckey"')[0]


def _running(hinted: HintedSlurm, job: int) -> list[str]:
    return hinted.slurm.run_command("squeue", "--noheader", "--states=running", f"--jobs={job}", "--format=%i").split()


def _begin(hinted: HintedSlurm, job: int) -> str:
    shown = hinted.slurm.run_command("scontrol", "show", "job", str(job))
    return shown.partition("StartTime=")[2].split()[0]


def test_no_text_of_a_user_stops_the_controller_or_the_hints(hinted: HintedSlurm) -> None:
    hostile = [
        hinted.slurm.submit_job("--hold", os.fsdecode(b"--comment=\xff\xfe gr\xf6\xdfe")),
        hinted.slurm.submit_job("--hold", "--comment=cachefs:%d%s,policy=suspend"),
        hinted.slurm.submit_job("--hold", script="#!/bin/sh\n#CACHEFS " + "a" * 1_000_000 + "\ntrue\n"),
    ]
    job = hinted.slurm.submit_job(WAITS)
    until(lambda: f"slurm:{job}" in hinted.service.asks, "the service was asked")
    assert hinted.nodes_of(job) in (("n3",), ("n4",))
    hinted.cancel(job, *hostile)
