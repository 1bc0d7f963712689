"""How a job and its consumers are called, so that no two trainings are taken for one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cachefs.publishing import channel
from cachefs.publishing.channel import HelperChannel, job_name, remove_helper_directory

SLURM = {"SLURM_JOB_ID": "77"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (SLURM, "slurm-77"),
        (SLURM | {"SLURM_STEP_ID": "0"}, "slurm-77.0"),
        (SLURM | {"SLURM_STEP_ID": "12"}, "slurm-77.12"),
        (SLURM | {"SLURM_STEP_ID": "4294967291"}, "slurm-77"),  # the batch script
        (SLURM | {"SLURM_STEP_ID": "4294967290"}, "slurm-77"),  # the shell of salloc
        (SLURM | {"SLURM_STEP_ID": "batch"}, "slurm-77"),
        (SLURM | {"SLURM_STEP_ID": "1", "CACHEFS_JOB": "mine"}, "mine"),
        ({"PBS_JOBID": "5.server"}, "pbs-5.server"),
        ({"LSB_JOBID": "6"}, "lsb-6"),
    ],
)
def test_a_job_is_called_by_number_and_step(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBID", "CACHEFS_JOB"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert job_name(["train.py"]) == expected


def holder(of_job: Path, pid: int) -> HelperChannel:
    """A channel of this process number, as far as claims are asked of it."""
    made = HelperChannel.__new__(HelperChannel)
    made.directory = of_job / f"{pid}-{len(list(of_job.iterdir()))}"
    made.directory.mkdir()
    return made


def test_one_process_of_a_job_has_a_rank(tmp_path: Path) -> None:
    of_job = tmp_path / "job"
    of_job.mkdir()
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    theirs, ours, again = holder(of_job, other.pid), holder(of_job, os.getpid()), holder(of_job, os.getpid())
    assert [theirs.claim_rank(0), theirs.claim_rank(0)] == [True, True]
    assert [ours.claim_rank(0), ours.claim_rank(1)] == [False, True]
    assert again.claim_rank(1), "the same process, after it has become another program"
    other.kill()
    other.communicate()
    assert ours.claim_rank(0), "its process has ended"
    remove_helper_directory(ours.directory)
    assert again.claim_rank(0), "its helper has ended"
    for made in (theirs, again):
        remove_helper_directory(made.directory)
    assert not of_job.exists()


def test_of_two_processes_that_find_a_dead_holder_one_has_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_job = tmp_path / "job"
    of_job.mkdir()
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    first, second = holder(of_job, other.pid), holder(of_job, os.getpid())
    (of_job / "rank-0").symlink_to("holder/999999999-dead")
    monkeypatch.setattr(channel, "_LOCK_ATTEMPTS", 2)
    unlink, won = Path.unlink, []

    def unlink_late(path: Path) -> None:
        if not won:
            won.append(False)
            won[0] = second.claim_rank(0)
        unlink(path)

    monkeypatch.setattr(Path, "unlink", unlink_late)
    assert [first.claim_rank(0), second.claim_rank(0), *won] == [True, False, False]
    other.kill()
    other.communicate()


def test_a_process_that_has_stopped_with_the_claims_locked_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_job = tmp_path / "job"
    of_job.mkdir()
    monkeypatch.setattr(channel, "_LOCK_ATTEMPTS", 2)
    made = holder(of_job, os.getpid())
    with channel._lock_claims(of_job):
        assert not made.claim_rank(0)
    assert made.claim_rank(0)


def test_nothing_of_the_environment_is_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CACHEFS_SOCKET", str(tmp_path / "none"))
    before = dict(os.environ)
    made = HelperChannel("environment")
    try:
        assert dict(os.environ) == before
    finally:
        made.close()
        channel.atexit.unregister(made.close)
