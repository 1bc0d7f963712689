"""Pods as users and controllers make them."""

from typing import Any


def pod(name: str, job: str = "", index: int | None = None, **annotations: str) -> dict[str, Any]:
    """A pod of the namespace `training`. job, index: of a Job whose pods are numbered; annotations: those of cachefs,
    such as `dataset="imagenet"` and `max_jobs_per_copy="2"`."""
    metadata: dict[str, Any] = {"name": name, "namespace": "training"}
    if annotations:
        metadata["annotations"] = {f"cachefs.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
    if job:
        metadata["labels"] = {"batch.kubernetes.io/job-name": job, "job-name": job}
        metadata["ownerReferences"] = [
            {"apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": f"uid-of-{job}", "controller": True}
        ]
    if index is not None:
        metadata["labels"]["batch.kubernetes.io/job-completion-index"] = str(index)
    return {"metadata": metadata, "spec": {"containers": [{"name": "train", "image": "train:1"}]}}


def asked(made: dict[str, Any], nodes: list[str]) -> dict[str, Any]:
    """What kube-scheduler asks about a pod."""
    return {"Pod": made, "Nodes": None, "NodeNames": nodes}
