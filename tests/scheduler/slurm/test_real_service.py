"""A real Slurm, the real service and real daemons: who holds what is what daemons report."""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from cachefs.observe_messages import CommandKind, NodeCommand
from cachefs.scheduling_messages import EXPLAIN_PATH, QUEUE_PATH, JobExplanation, QueueStatus
from tests.scheduler.observed import Observed, made_files, observed
from tests.scheduler.running import Scheduler, scheduler
from tests.scheduler.slurm.hinted import HintedSlurm, slurm_asking
from tests.waiting import until

READS = "--comment=cachefs:set"
WAITS = "--comment=cachefs:set,policy=suspend,max-jobs-per-copy=1"
WHOLE = "--ntasks=4"


@dataclass(frozen=True)
class Place:
    """Four daemons, called as the nodes of Slurm are; the dataset is on n3 and n4."""

    daemons: dict[str, Observed]
    scheduler: Scheduler
    hinted: HintedSlurm


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    work = tmp_path_factory.mktemp("s")
    made_files(work / "set", 64)
    with ExitStack() as stack:
        daemons = {name: stack.enter_context(observed(work / name, name)) for name in ("n1", "n2", "n3", "n4")}
        for each in daemons.values():
            each.daemon.add_dataset("set", f"file://{work}/set")
        service = stack.enter_context(scheduler(work / "c", [each.address for each in daemons.values()]))
        service.until(lambda: (status := service.status()) is not None and status.fresh == 4)
        yield Place(daemons, service, stack.enter_context(slurm_asking(service.socket, work, {"hints_last": 15})))


@pytest.fixture
def place(started: Place) -> Iterator[Place]:
    """No jobs, also for the service."""
    until(lambda: not started.scheduler.client.get(QUEUE_PATH, QueueStatus).jobs, "the service knows of no job")
    for name, each in started.daemons.items():
        kind = CommandKind.WARM if name in ("n3", "n4") else CommandKind.EVICT
        shards = bytes([255] * 32) if kind == CommandKind.WARM else b""
        each.order(NodeCommand(kind=kind, id=uuid.uuid4().hex, dataset="set", shards=shards))
    for name in started.daemons:
        part = float(name in ("n3", "n4"))
        until(lambda name=name, part=part: started.scheduler.held(name) == part, f"the service knows of {name}")
    until(lambda: started.hinted.shows("set", {"n3", "n4"}), "Slurm knows where the dataset is")
    yield started
    started.hinted.slurm.cancel_all()


def test_jobs_go_where_daemons_have_the_dataset(place: Place) -> None:
    hinted = place.hinted
    first = [hinted.run_on(WHOLE, READS)[1] for _ in range(2)]
    assert sorted(first) == [("n3",), ("n4",)]
    job, nodes = hinted.run_on(WHOLE, READS)
    # It had to go elsewhere, and its data follows: before it reads anything, as nobody reads here.
    until(lambda: place.scheduler.held(nodes[0]) == 1.0, "the dataset is where the job is")
    found = place.scheduler.client.get(EXPLAIN_PATH, JobExplanation, job=f"slurm:{job}")
    assert found.placed == list(nodes)


def test_a_job_waits_for_a_slot_of_a_copy_and_a_dead_service_keeps_nobody_waiting(place: Place) -> None:
    hinted = place.hinted
    jobs = [hinted.run_on(WAITS)[0] for _ in range(2)]
    third = hinted.slurm.submit_job(WAITS)
    until(lambda: _state(place, third) == "waiting", "it has its place in the queue")
    assert hinted.slurm.job_state(third)[::2] == ("PENDING", "BeginTime")
    hinted.cancel(jobs[0])
    assert hinted.nodes_of(third)
    place.scheduler.kill()
    try:
        assert hinted.run_on(READS)
    finally:
        place.scheduler.start()


def _state(place: Place, job: int) -> str:
    queue = place.scheduler.client.get(QUEUE_PATH, QueueStatus).jobs
    return next((one.state for one in queue if one.job == f"slurm:{job}"), "")
