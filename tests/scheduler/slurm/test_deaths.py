"""Where a part dies, a real Slurm goes on as it would without cachefs."""

from collections.abc import Iterator

import pytest

from tests.scheduler.slurm.hinted import HintedSlurm, hinted_slurm
from tests.waiting import until

READS = "--comment=cachefs:imagenet"
WAITS = "--comment=cachefs:imagenet,policy=suspend"


@pytest.fixture
def hinted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HintedSlurm]:
    with hinted_slurm(tmp_path_factory.mktemp("s"), {"hints_last": 8, "wait_for": 16}) as hinted:
        hinted.hold(imagenet={"n4": 1.0})
        hinted.service.set_slots("imagenet", 0)
        yield hinted


@pytest.mark.parametrize(
    "dies",
    [
        "both",
        pytest.param("service", marks=pytest.mark.cluster),
        pytest.param("hint command", marks=pytest.mark.cluster),
    ],
)
def test_jobs_are_taken_hints_grow_old_and_who_waits_may_start(hinted: HintedSlurm, dies: str) -> None:
    assert hinted.run_on(READS)[1] == ("n4",)
    waiting = hinted.slurm.submit(WAITS)
    until(lambda: f"slurm:{waiting}" in hinted.service.asks, "the service was asked")
    if dies != "hint command":
        hinted.service.stop()
    if dies != "service":
        hinted.kill_hint()
    until(lambda: not _is_preferred(hinted), "hints are too old")
    hinted.run_on(READS)
    hinted.nodes_of(waiting)
    assert "no hint for a job that reads imagenet" in hinted.slurm.log()
    if dies != "hint command":
        hinted.service.start()
    if dies != "service":
        hinted.start_hint({"hints_last": 8, "wait_for": 16})
    until(lambda: _is_preferred(hinted), "hints are back")


def _is_preferred(hinted: HintedSlurm) -> bool:
    """Does Lua have a new job prefer something?"""
    job = hinted.slurm.submit(READS, "--hold")
    shown = hinted.slurm.run("squeue", "--json")
    hinted.slurm.run("scancel", str(job))
    return '"prefer": "cachefs_imagenet_some"' in shown.partition(f'"job_id": {job},')[2].partition('"wckey"')[0]
