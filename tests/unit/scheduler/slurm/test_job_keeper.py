"""What the service hears of jobs that have ended while neither it nor this program was there."""

from dataclasses import replace

import pytest

from cachefs.errors import CachefsError
from cachefs.scheduling_messages import PlacementReport
from cachefs_scheduler.slurm.config import SlurmSection
from cachefs_scheduler.slurm.job_keeper import JobKeeper
from cachefs_scheduler.slurm.job_records import JobTag, SlurmJob
from cachefs_scheduler.slurm.service_client import CallRefused
from tests import virtual_time

RUNNING = SlurmJob("slurm:1", "1", JobTag("a"), "anna", 0, 1, waiting=False, nodes=("n1",), eligible=0, held=False,
                   admin_comment="")  # fmt: skip


class _Slurm:
    def __init__(self, *jobs: SlurmJob) -> None:
        self.listed = list(jobs)
        self.broken = False

    async def list_jobs(self) -> list[SlurmJob]:
        if self.broken:
            raise CachefsError("squeue did not end within 30 s")
        return self.listed


class _Service:
    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.down = False
        self.placed_jobs: list[str] = []
        self.refused = ""

    async def fetch_known_jobs(self, prefix: str) -> list[str]:
        if self.down:
            raise CachefsError("cachefs-scheduler does not answer")
        return [name for name in self.names if name.startswith(prefix)]

    async def report_placed(self, placed: PlacementReport) -> None:
        if placed.job == self.refused:
            raise CallRefused("cachefs-scheduler answers /v1/placed with 400")
        if self.down:
            raise CachefsError("cachefs-scheduler does not answer")
        self.placed_jobs.append(placed.job)

    async def report_ended(self, name: str) -> None:
        self.names.discard(name)


def keeper(service: _Service, slurm: _Slurm, cluster: str = "") -> JobKeeper:
    return JobKeeper(SlurmSection(cluster=cluster), service, slurm)  # type: ignore[arg-type]


@pytest.mark.parametrize("trouble", ["none", "service", "squeue"])
def test_jobs_that_slurm_has_no_longer_give_their_slots_back(trouble: str) -> None:
    service, slurm = _Service("slurm:1", "slurm:2", "kube:default/pod/a", "slurm:other/3"), _Slurm(RUNNING)
    one = keeper(service, slurm)
    service.down, slurm.broken = trouble == "service", trouble == "squeue"
    virtual_time.run(one.run_pass())
    if trouble != "none":
        # Where Slurm does not answer, nothing is known of what has ended.
        assert "slurm:2" in service.names
        service.down = slurm.broken = False
        virtual_time.run(one.run_pass())
    assert service.names == {"slurm:1", "kube:default/pod/a", "slurm:other/3"}
    assert set(service.placed_jobs) == {"slurm:1"}


def test_of_several_clusters_each_ends_its_own() -> None:
    service = _Service("slurm:1", "slurm:here/2", "slurm:here/3", "slurm:there/4")
    slurm = _Slurm(replace(RUNNING, name="slurm:here/3", id="3"))
    virtual_time.run(keeper(service, slurm, "here").run_pass())
    assert service.names == {"slurm:1", "slurm:here/3", "slurm:there/4"}


def test_a_job_that_the_service_refuses_keeps_nobody_from_telling_of_the_others() -> None:
    service = _Service()
    service.refused = "slurm:1"
    one = keeper(service, _Slurm(RUNNING, replace(RUNNING, name="slurm:2", id="2")))
    virtual_time.run(one.run_pass())
    assert service.placed_jobs == ["slurm:2"]
    # Nor is it told again at once, else a thousand such jobs would take up each look.
    service.refused = ""
    virtual_time.run(one.run_pass())
    assert service.placed_jobs == ["slurm:2"]


def test_jobs_that_a_silent_service_was_not_told_of_are_told_in_the_next_look() -> None:
    service = _Service()
    service.down = True
    one = keeper(service, _Slurm(RUNNING))
    virtual_time.run(one.run_pass())
    service.down = False
    virtual_time.run(one.run_pass())
    assert service.placed_jobs == ["slurm:1"]
