"""Whose process keeps a job, and whose does not."""

import os
import subprocess

import pytest

from cachefs_daemon.jobs.liveness import PublisherLiveness
from cachefs_daemon.jobs.owners import user_of

OTHER = os.getuid() + 4711


@pytest.mark.parametrize(("owner", "lapsed"), [(os.getuid(), ""), (0, ""), (OTHER, "no heartbeat for 5 s")])
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_only_a_process_of_ones_own_keeps_a_job(
    owner: int, lapsed: str, is_elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachefs_daemon.jobs.liveness.find_pid", lambda pid, namespace: os.getpid())
    liveness = PublisherLiveness(os.getpid(), 5, 0.0, 1 if is_elsewhere else 0, owner)
    if is_elsewhere:
        liveness.find_process()
    assert liveness.end_reason(6.0) == lapsed
    assert liveness.end_reason(4.0) == ""
    assert (liveness.process_start is None) == bool(lapsed)


def test_for_somebody_unknown_a_process_only_ends_a_job_sooner() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        liveness = PublisherLiveness(process.pid, 5, 0.0, owner=None)
        assert liveness.end_reason(4.0) == ""
        assert liveness.end_reason(6.0) == "no heartbeat for 5 s"
        process.communicate()
        assert liveness.end_reason(4.0) == f"its process {process.pid} has ended"


def test_whose_a_job_is_follows_from_its_name() -> None:
    assert [user_of(job) for job in ("j", "j~0", "j~1000", "j~control")] == [os.geteuid(), 0, 1000, None]
