"""Which job a pod belongs to, and what its annotations ask for."""

import pytest

from cachefs.scheduling_messages import PlacementPolicy
from cachefs_scheduler.kube.kube_messages import EventLimiter, ObjectMetadata, OwnerReference, Pod, PodEvent, PodSpec
from cachefs_scheduler.kube.pod_job import job_name, parse_pod_job


def made(labels: dict[str, str] | None = None, owner: OwnerReference | None = None, **annotations: str) -> Pod:
    written = {f"cachefs.io/{name.replace('_', '-')}": value for name, value in annotations.items()}
    owners = [owner] if owner is not None else None
    return Pod(
        ObjectMetadata("pod-1", "team", "uid-1", labels=labels, annotations=written, owners=owners), PodSpec(priority=7)
    )


@pytest.mark.parametrize(
    ("labels", "owner", "expected"),
    [
        (None, None, "kube:team/pod/pod-1"),
        ({"batch.kubernetes.io/job-name": "train"}, OwnerReference("Job", "train", True), "kube:team/job/train"),
        ({"job-name": "train"}, None, "kube:team/job/train"),
        (
            {"training.kubeflow.org/job-name": "train"}, OwnerReference("PyTorchJob", "train", True),
            "kube:team/pytorchjob/train",
        ),
        (
            {"jobset.sigs.k8s.io/jobset-name": "set", "batch.kubernetes.io/job-name": "set-workers-0"},
            OwnerReference("Job", "set-workers-0", True), "kube:team/jobset/set",
        ),
        (None, OwnerReference("StatefulSet", "workers", True), "kube:team/statefulset/workers"),
        (None, OwnerReference("Something", "else", False), "kube:team/pod/pod-1"),
    ],
    ids=range(7),
)  # fmt: skip
def test_pods_of_one_job_have_its_name(
    labels: dict[str, str] | None, owner: OwnerReference | None, expected: str
) -> None:
    assert job_name(made(labels, owner).metadata) == expected


def test_what_annotations_say() -> None:
    labels = {"batch.kubernetes.io/job-name": "train", "batch.kubernetes.io/job-completion-index": "3"}
    job, warnings = parse_pod_job(
        made(labels, None, dataset=" imagenet@latest ", policy="Clone", max_jobs_per_copy="2", ranks="8")
    )
    assert warnings == ()
    assert job is not None
    assert (job.request.job, job.request.dataset, job.request.policy) == (
        "kube:team/job/train",
        "imagenet@latest",
        PlacementPolicy.CLONE,
    )
    assert (job.request.max_jobs_per_copy, job.request.ranks, job.request.user, job.request.priority) == (
        2,
        8,
        "team",
        7,
    )
    assert (job.rank, job.ranks) == (3, 8)


@pytest.mark.parametrize("dataset", ["", "two words", "é", "x" * 400, "a\nb"])
def test_what_names_no_dataset_asks_for_nothing_and_says_so(dataset: str) -> None:
    job, warnings = parse_pod_job(made(dataset=dataset))
    assert job is None
    assert warnings[0].startswith("annotation cachefs.io/dataset: expected NAME, NAME@SNAPSHOT or NAME@latest, not ")
    assert "\n" not in warnings[0]


@pytest.mark.parametrize("text", ["0", "-1", "1e3", "many", "1000001", "٣", "9" * 5000])
def test_numbers_that_are_none_are_ignored_and_said(text: str) -> None:
    job, warnings = parse_pod_job(made(dataset="imagenet", max_jobs_per_copy=text))
    assert job is not None
    assert job.request.max_jobs_per_copy == 0
    assert len(warnings) == 1
    assert len(warnings[0]) < 250


def test_a_pod_alone_is_one_rank_whatever_it_says() -> None:
    job, _ = parse_pod_job(made(dataset="imagenet", ranks="4"))
    assert job is not None
    assert (job.ranks, job.rank, job.request.ranks) == (1, 0, 1)


def test_events_are_few() -> None:
    sieve = EventLimiter()
    pods = [ObjectMetadata(f"pod-{number}", "team", f"uid-{number}") for number in range(200)]
    assert sum(sieve.can_write(PodEvent(pod, "Waiting", "place 3"), 0) for pod in pods) == 50
    assert sum(sieve.can_write(PodEvent(pod, "Waiting", "place 3"), 1) for pod in pods) == 5
    first = pods[0]
    assert not sieve.can_write(PodEvent(first, "Waiting", "place 2"), 10)  # it would change with each job that ends
    assert sieve.can_write(PodEvent(first, "Admitted", "go"), 10)
    assert sieve.can_write(PodEvent(first, "Waiting", "place 2"), 30)
    assert not sieve.can_write(PodEvent(first, "Waiting", "place 2"), 1000)
    assert sieve.can_write(PodEvent(first, "Waiting", "place 2"), 3000)  # the API server has forgotten the first one
