"""Parses jobs from `squeue --json`, with their host lists and tags.

Slurm 22.05 (openapi v0.0.38) gives plain numbers and a single state; later versions give `{"set": true, "number": 5}`
and a list of states. Both are accepted; tested with 22.05.

A host list is `n[1-3,7],login` or `rack[1-2]n[01-16]`. A tag is part of a job's comment:
`cachefs:imagenet@latest,policy=suspend,max-jobs-per-copy=4`. Lua writes the tag into the job's admin comment, with the
changes it has made; users may write it into their comment.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

import msgspec

from cachefs.errors import CachefsError
from cachefs.scheduling_messages import MAX_JOBS_PER_COPY, MAX_RANKS, PlacementPolicy, PlacementRequest

_TAG: Final = re.compile(r"(?:^|[\s;])cachefs:([^\s;,]+)((?:,[a-z-]+=[^\s;,]+)*)")
_DATASET: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}(@[A-Za-z0-9]{1,64})?")
_MAX_COMMENT: Final = 4096  # characters of a comment that are parsed


_HELD: Final = re.compile(r"(cachefs:[^\s;]*),held=yes")
MAX_NAMES: Final = 65536
_GROUP: Final = re.compile(r"\[([^\[\]]*)\]")
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_WITH_NODES: Final = {"RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
_WAITING: Final = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}


@dataclass(frozen=True, slots=True)
class JobTag:
    """The tag of a job."""

    dataset: str
    policy: PlacementPolicy = PlacementPolicy.PREFER
    max_jobs_per_copy: int = 0
    # The job's original begin time (Unix), if it had one.
    begin: int = 0
    # Whether the job was held at submission, to be released by this program.
    held: bool = False

    @property
    def can_wait(self) -> bool:
        """Return whether the service decides when the job starts."""
        return self.policy == PlacementPolicy.SUSPEND


def released_comment(comment: str) -> str:
    """Return the comment of a job after its release: if it is held again, that is the user's wish."""
    return _HELD.sub(r"\1", comment)


def parse_tag(*comments: str) -> JobTag | None:
    """Return the tag of the first comment with one; None if there is none, or it is invalid."""
    for comment in comments:
        # The last tag counts: Lua appends its own.
        found = list(_TAG.finditer(comment[:_MAX_COMMENT]))
        if found:
            words = dict(word.split("=", 1) for word in found[-1][2].split(",") if word)
            return _tag(found[-1][1], words)
    return None


def _tag(dataset: str, words: dict[str, str]) -> JobTag | None:
    policy = words.get("policy", PlacementPolicy.PREFER)
    if not _DATASET.fullmatch(dataset) or policy not in list(PlacementPolicy):
        return None
    jobs, begin = _number_of_text(words.get("max-jobs-per-copy", "0")), _number_of_text(words.get("begin", "0"))
    return JobTag(dataset, PlacementPolicy(policy), min(jobs, MAX_JOBS_PER_COPY), begin, words.get("held") == "yes")


def _number_of_text(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else 0


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the names, in their order. Raises ValueError for an invalid list, or more than MAX_NAMES."""
    found: list[str] = []
    for word in _split_hostlist(hostlist):
        # Even positions are plain text, odd ones the contents of brackets.
        pieces = _GROUP.split(word)
        choices = [_expand_brackets(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        size = 1
        for choice in choices:
            size *= len(choice)
        if size + len(found) > MAX_NAMES or any("[" in text or "]" in text for text in pieces[::2]):
            raise ValueError(f"no list of nodes: {hostlist[:80]}")
        found.extend("".join(chosen) for chosen in product(*choices))
    return found


def _split_hostlist(hostlist: str) -> list[str]:
    """Split at commas outside of brackets."""
    words, depth, start = [], 0, 0
    for index, letter in enumerate(hostlist):
        if letter == "," and depth == 0:
            words.append(hostlist[start:index])
            start = index + 1
        depth += (letter == "[") - (letter == "]")
    words.append(hostlist[start:])
    return [word for word in words if word]


def _expand_brackets(inside: str) -> list[str]:
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"no range of nodes: [{inside[:80]}]")
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < MAX_NAMES:
            raise ValueError(f"no range of nodes: [{inside[:80]}]")
        found.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return found


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
        # Slurm passes on users' bytes, such as a comment in Latin-1.
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
