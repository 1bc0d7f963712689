import json

import pytest

from cachefs.errors import CachefsError
from cachefs.scheduling_messages import PlacementPolicy
from cachefs_scheduler.slurm.job_records import JobTag, SlurmJob, parse_jobs, parse_tag, released_comment, single_tasks

# As squeue of Slurm 22.05.8 said it, without what is not read.
RUNNING = {
    "job_id": 53, "array_job_id": 0, "array_task_id": None, "array_task_string": "", "job_state": "RUNNING",
    "state_reason": "None", "nodes": "n[1-2]", "node_count": 2, "user_name": "anna", "priority": 4294901710,
    "eligible_time": 1795423422, "comment": "cachefs:imagenet@latest", "admin_comment": "", "gres_detail": [],
}  # fmt: skip


def jobs(*changes: dict[str, object]) -> list[SlurmJob]:
    return parse_jobs(json.dumps({"meta": {}, "errors": [], "jobs": [RUNNING | each for each in changes]}).encode())


def test_a_running_job() -> None:
    (job,) = jobs({})
    assert job.name == "slurm:53"
    assert job.nodes == ("n1", "n2")
    assert job.request.dataset == "imagenet@latest"
    assert (job.request.ranks, job.request.user, job.request.priority) == (2, "anna", 4294901710 - (1 << 31))


def test_jobs_that_read_nothing_are_left_out() -> None:
    assert jobs({"comment": ""}, {"comment": "about cachefs: slow"}, {"job_id": None}) == []


def test_a_pending_array_is_asked_for_task_by_task() -> None:
    (job,) = jobs(
        {"job_id": 7, "array_job_id": 7, "array_task_string": "1,3-9:2%2", "job_state": "PENDING", "nodes": ""}
    )
    assert [task.id for task in single_tasks(job, 4)] == ["7_1", "7_3", "7_5", "7_7"]
    (task,) = jobs({"job_id": 8, "array_job_id": 7, "array_task_id": 3})
    assert (task.name, list(single_tasks(task, 4))) == ("slurm:7_3", [task])


def test_two_clusters_of_one_service() -> None:
    (job,) = parse_jobs(json.dumps({"jobs": [RUNNING]}).encode(), "blue")
    assert (job.name, job.id) == ("slurm:blue/53", "53")


def test_a_list_that_slurm_cut_short() -> None:
    (job,) = jobs({"job_id": 7, "array_job_id": 7, "array_task_string": "1,3,...", "job_state": "PENDING"})
    assert [task.id for task in single_tasks(job, 9)] == ["7_1", "7_3"]


def test_how_later_versions_write_numbers_and_states() -> None:
    number = {"set": True, "infinite": False, "number": 5}
    (job,) = jobs(
        {"job_state": ["PENDING"], "eligible_time": number, "priority": number, "array_task_id": {"set": False}}
    )
    assert (job.waiting, job.eligible, job.nodes) == (True, 5, ())


def test_states() -> None:
    ended, held, admins = jobs(
        {"job_state": "COMPLETED"}, {"job_state": "PENDING", "state_reason": "JobHeldUser"},
        {"job_state": "PENDING", "state_reason": "JobHeldAdmin"},
    )  # fmt: skip
    assert (ended.waiting, ended.nodes) == (False, ())
    assert (held.held, admins.held) == (True, False)


@pytest.mark.parametrize("text", [b"", b"{}", b"slurm_load_jobs error", b'{"jobs": [{"job_id": "x"}]}'])
def test_what_is_no_answer(text: bytes) -> None:
    with pytest.raises(CachefsError, match="squeue --json"):
        parse_jobs(text)


@pytest.mark.parametrize(
    ("comment", "tag"),
    [
        ("cachefs:imagenet", JobTag("imagenet")),
        ("run 5; cachefs:imagenet@3f9c,policy=clone", JobTag("imagenet@3f9c", PlacementPolicy.CLONE)),
        ("cachefs:a,policy=suspend,max-jobs-per-copy=4,begin=1795423422,held=yes",
         JobTag("a", PlacementPolicy.SUSPEND, 4, 1795423422, held=True)),
        ("cachefs:old cachefs:new", JobTag("new")),
        ("cachefs:a,max-jobs-per-copy=99999999999999999", JobTag("a")),
        ("xcachefs:a", None), ("cachefs:../a", None), ("cachefs:a,policy=x", None), ("", None),
    ],
)  # fmt: skip
def test_tags(comment: str, tag: JobTag | None) -> None:
    assert parse_tag(comment) == tag


def test_what_lua_says_goes_first() -> None:
    assert parse_tag("cachefs:a,policy=suspend", "cachefs:b") == JobTag("a", PlacementPolicy.SUSPEND)


def test_a_job_is_released_once() -> None:
    assert released_comment("mine cachefs:a,policy=suspend,held=yes") == "mine cachefs:a,policy=suspend"
    assert parse_tag(released_comment("cachefs:a,held=yes,begin=5")) == JobTag("a", begin=5)


def test_a_comment_that_is_no_utf8_hides_no_other_job() -> None:
    # Slurm passes on what a user has written: `sbatch --comment=$'\xff'`.
    rows = [
        b'{"job_id":1,"job_state":"PENDING","comment":"gr\xf6\xdfe"}',
        b'{"job_id":2,"job_state":"PENDING","comment":"\xff cachefs:set,policy=suspend"}',
        b'{"job_id":3,"job_state":"PENDING","comment":"cachefs:set"}',
    ]
    found = parse_jobs(b'{"jobs":[' + b",".join(rows) + b"]}")
    assert [(job.id, job.tag.can_wait) for job in found] == [("2", True), ("3", False)]
