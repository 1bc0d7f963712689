from dataclasses import replace

from cachefs.scheduling_messages import PlacementPolicy
from cachefs_scheduler.slurm.job_keeper import WaitingChanges, is_due, waiting_changes
from cachefs_scheduler.slurm.job_records import JobTag, SlurmJob

NOW, WAIT = 1_000_000.0, 100.0
JOB = SlurmJob("slurm:1", "1", JobTag("a", PlacementPolicy.SUSPEND), "anna", 0, 1, waiting=True, nodes=(),
               eligible=NOW + 90, held=False, admin_comment="")  # fmt: skip
NOTHING = WaitingChanges([], [], [], [])


def of(job: SlurmJob, **go: bool) -> WaitingChanges:
    return waiting_changes([job], {f"slurm:{name.strip('_')}": each for name, each in go.items()}, NOW, WAIT)


def test_it_starts_once_it_may() -> None:
    assert of(JOB, _1=True) == replace(NOTHING, start=["1"])
    assert of(replace(JOB, eligible=NOW - 5), _1=True) == NOTHING


def test_it_is_put_off_before_its_time_comes() -> None:
    assert of(JOB, _1=False) == NOTHING
    assert of(replace(JOB, eligible=NOW + 40), _1=False) == replace(NOTHING, put_off=["1"])
    assert of(replace(JOB, eligible=NOW - 9), _1=False) == replace(NOTHING, put_off=["1"])


def test_where_the_service_is_silent_nothing_keeps_it() -> None:
    assert of(replace(JOB, eligible=NOW + 1)) == NOTHING


def test_other_policies_and_running_jobs_are_left_alone() -> None:
    assert of(replace(JOB, tag=JobTag("a", PlacementPolicy.CLONE), eligible=NOW), _1=False) == NOTHING
    assert of(replace(JOB, waiting=False), _1=True) == NOTHING


def test_the_begin_time_of_its_user_stays() -> None:
    wished = replace(JOB, tag=replace(JOB.tag, begin=int(NOW) + 60))
    assert of(wished, _1=True) == replace(NOTHING, later=[("1", 60)])
    assert of(replace(wished, eligible=NOW + 60), _1=True) == NOTHING
    # Put off by its user since.
    assert of(replace(JOB, eligible=NOW + 5000), _1=True) == NOTHING
    assert not is_due(replace(JOB, eligible=NOW + 5000), NOW, WAIT)


def test_what_we_hold_is_released_and_nothing_else() -> None:
    ours = replace(JOB, held=True, eligible=0, tag=replace(JOB.tag, held=True))
    assert of(ours, _1=True) == replace(NOTHING, release=[ours])
    assert of(ours, _1=False) == NOTHING
    assert of(replace(ours, tag=JOB.tag), _1=True) == NOTHING


def test_tasks_of_an_array_one_by_one() -> None:
    array = replace(JOB, tasks="1-3,7", eligible=NOW + 10)
    assert of(array, **{"1_1": True, "1_2": False}) == replace(NOTHING, start=["1_1"], put_off=["1_[1-3,7]"])
