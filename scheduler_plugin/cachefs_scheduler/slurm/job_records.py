"""Parses jobs from `squeue --json`.

Slurm 22.05 (openapi v0.0.38) gives plain numbers and a single state; later versions give `{"set": true, "number": 5}`
and a list of states. Both are accepted; tested with 22.05.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from cachefs.errors import CachefsError
from cachefs.scheduling_messages import MAX_RANKS, PlacementRequest
from cachefs_scheduler.slurm.hostlist import expand_hostlist
from cachefs_scheduler.slurm.job_tag import JobTag, parse_tag

_WITH_NODES: Final = {"RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
_WAITING: Final = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}


class _Number(msgspec.Struct):
    set: bool = False
    infinite: bool = False
    number: float = 0


_Numeric = int | float | _Number | None


class _SqueueJob(msgspec.Struct):
    job_id: _Numeric = None
    array_job_id: _Numeric = None
    array_task_id: _Numeric = None
    array_task_string: str | None = None
    job_state: str | list[str] = ""
    state_reason: str | None = None
    nodes: str | None = None
    node_count: _Numeric = None
    user_name: str | None = None
    priority: _Numeric = None
    eligible_time: _Numeric = None
    comment: str | None = None
    admin_comment: str | None = None


class _SqueueOutput(msgspec.Struct):
    jobs: list[_SqueueJob]


_DECODER: Final = msgspec.json.Decoder(_SqueueOutput)


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job that reads a dataset, or a task of a job array."""

    # The name in the service, and the id for scontrol.
    name: str
    id: str
    tag: JobTag
    user: str
    priority: int
    # Number of nodes that the job has, or requests at least.
    node_count: int
    # A job waits, has nodes, or (neither) has ended.
    waiting: bool
    nodes: tuple[str, ...]
    # Unix time from which on the job may start.
    eligible: float
    # Held like Lua and users hold jobs. Jobs held by an administrator are not released by this program.
    held: bool
    # The whole comment, so that it can be rewritten.
    admin_comment: str
    # Waiting tasks of an array that are still one record of Slurm, such as `1,4-6`.
    tasks: str = ""

    @property
    def request(self) -> PlacementRequest:
        """The request to the service."""
        return PlacementRequest(
            job=self.name, dataset=self.tag.dataset, policy=self.tag.policy,
            max_jobs_per_copy=self.tag.max_jobs_per_copy, ranks=self.node_count, user=self.user, priority=self.priority,
        )  # fmt: skip


def job_prefix(cluster: str) -> str:
    """Return the prefix of job names in the service. cluster: name of the cluster if one service has several; else
    empty."""
    return f"slurm:{cluster}/" if cluster else "slurm:"


def parse_jobs(text: bytes, cluster: str = "") -> list[SlurmJob]:
    """Return the jobs that read a dataset. cluster: see `job_prefix`. Raises CachefsError for invalid output."""
    try:
        try:
            rows = _DECODER.decode(text).jobs
        except UnicodeDecodeError:  # Slurm passes on users' bytes, such as a comment in Latin-1
            rows = _DECODER.decode(text.decode(errors="replace")).jobs
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise CachefsError(f"the output of squeue --json is invalid: {error}") from None
    return [job for row in rows if (job := _job(row, job_prefix(cluster))) is not None]


def _job(row: _SqueueJob, prefix: str) -> SlurmJob | None:
    tag = parse_tag(row.admin_comment or "", row.comment or "")
    number = _number(row.job_id)
    if tag is None or not number:
        return None
    states = {row.job_state} if isinstance(row.job_state, str) else set(row.job_state)
    waiting = bool(states & _WAITING)
    try:
        nodes = tuple(expand_hostlist(row.nodes or "")) if states & _WITH_NODES and not waiting else ()
    except ValueError:
        nodes = ()
    name = _name(row, number)
    return SlurmJob(
        name=f"{prefix}{name}", id=name, tag=tag, user=(row.user_name or "")[:253],
        # Slurm's priorities range from 0 to 2^32 - 1.
        priority=min(max(_number(row.priority) - (1 << 31), -(1 << 31)), (1 << 31) - 1),
        node_count=min(max(_number(row.node_count), len(nodes), 1), MAX_RANKS), waiting=waiting, nodes=nodes,
        eligible=_number(row.eligible_time), held=waiting and row.state_reason == "JobHeldUser",
        admin_comment=row.admin_comment or "",
        tasks=(row.array_task_string or "").partition("%")[0] if waiting else "",
    )  # fmt: skip


def _name(row: _SqueueJob, number: int) -> str:
    """Return the name, such as `12_3` for task 3 of the array 12, even if the task has a number of its own."""
    array = _number(row.array_job_id)
    if not array or row.array_task_id is None or (isinstance(row.array_task_id, _Number) and not row.array_task_id.set):
        return str(number)
    return f"{array}_{_number(row.array_task_id)}"


def _number(value: _Numeric) -> int:
    return int(value.number if isinstance(value, _Number) else value or 0)


def single_tasks(job: SlurmJob, most: int) -> Sequence[SlurmJob]:
    """Return the first tasks of an array as jobs; for any other job, the job itself."""
    if not job.tasks:
        return [job]
    found: list[SlurmJob] = []
    for part in job.tasks.split(","):
        first, _, last = part.partition("-")
        last, _, step = (last or first).partition(":")
        if not (first.isdigit() and last.isdigit() and (step or "1").isdigit()):
            break
        for number in range(int(first), int(last) + 1, max(1, int(step or 1)))[: most - len(found)]:
            found.append(replace(job, name=f"{job.name}_{number}", id=f"{job.id}_{number}", tasks=""))
    return found
