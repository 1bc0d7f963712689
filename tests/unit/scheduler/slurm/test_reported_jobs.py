from dataclasses import replace

from cachefs_scheduler.slurm.job_keeper import REPEAT_SECONDS, ReportedJobs
from cachefs_scheduler.slurm.job_records import JobTag, SlurmJob

RUNNING = SlurmJob("slurm:1", "1", JobTag("a"), "anna", 0, 1, waiting=False, nodes=("n1",), eligible=0, held=False,
                   admin_comment="")  # fmt: skip
WAITING = replace(RUNNING, waiting=True, nodes=())
ENDED = replace(RUNNING, nodes=())


def test_a_job_from_its_start_to_its_end() -> None:
    told = ReportedJobs()
    assert told.unreported_changes([WAITING], 0.0).placed == []
    told.note_known("slurm:1")
    assert told.unreported_changes([RUNNING], 1.0).placed == [RUNNING]
    told.note_placed(RUNNING, 1.0)
    assert told.unreported_changes([RUNNING], 2.0).placed == []
    larger = replace(RUNNING, nodes=("n1", "n2"))
    assert told.unreported_changes([larger], 3.0).resized == [larger]
    told.note_placed(larger, 3.0)
    assert told.unreported_changes([larger], 3.0 + REPEAT_SECONDS).placed == [larger]
    assert told.unreported_changes([ENDED], 4.0).ended == ["slurm:1"]
    told.note_ended("slurm:1")
    assert told.unreported_changes([], 5.0).ended == []


def test_what_was_not_said_is_due_again() -> None:
    told = ReportedJobs()
    assert told.unreported_changes([RUNNING], 0.0).placed == told.unreported_changes([RUNNING], 1.0).placed == [RUNNING]


def test_a_job_that_was_cancelled_while_it_waited() -> None:
    told = ReportedJobs()
    told.unreported_changes([WAITING], 0.0)
    told.note_known("slurm:1")
    assert told.unreported_changes([], 1.0).ended == ["slurm:1"]


def test_after_a_restart_the_service_hears_of_jobs_that_ended_meanwhile() -> None:
    told = ReportedJobs()
    assert told.unreported_changes([ENDED], 0.0).ended == []
    told.note_known("slurm:1")
    assert told.unreported_changes([ENDED], 1.0).ended == ["slurm:1"]
    told.note_ended("slurm:1")
    assert told.unreported_changes([ENDED], 2.0).ended == []


def test_after_a_restart_a_job_that_runs_is_said_again_and_one_that_waits_goes_on_waiting() -> None:
    told = ReportedJobs()
    told.note_known("slurm:1")
    assert told.unreported_changes([WAITING], 0.0).ended == []
    found = told.unreported_changes([RUNNING], 1.0)
    assert (found.placed, found.resized, found.ended) == ([RUNNING], [], [])
