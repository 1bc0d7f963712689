"""Derives a pod's job and request from its labels and annotations."""

from dataclasses import dataclass
from typing import Final

import msgspec

from cachefs.scheduling_messages import MAX_JOBS_PER_COPY, MAX_RANKS, PlacementPolicy, PlacementRequest
from cachefs_scheduler.kube.kube_messages import ObjectMetadata, Pod

DATASET: Final = "cachefs.io/dataset"
POLICY: Final = "cachefs.io/policy"
JOBS_PER_COPY: Final = "cachefs.io/max-jobs-per-copy"
RANKS: Final = "cachefs.io/ranks"
GATE: Final = "cachefs.io/copy-slot"
KUBE: Final = "kube:"

# Labels that name the job of a pod, and the job's kind as kubectl calls it. The first label present counts: pods of a
# JobSet have the label of their Job too.
_JOB_LABELS: Final = (
    ("jobset.sigs.k8s.io/jobset-name", "jobset"),
    ("training.kubeflow.org/job-name", ""),
    ("batch.kubernetes.io/job-name", "job"),
    ("job-name", "job"),
)
# Labels with a pod's rank. Kubeflow's is not used, since it numbers masters and workers separately.
_RANK_LABELS: Final = ("batch.kubernetes.io/job-completion-index", "apps.kubernetes.io/pod-index")
# Kind of a job that consists of one pod without a controller.
_SINGLE_POD: Final = "pod"
_MAX_SHOWN: Final = 60


@dataclass(frozen=True, slots=True)
class PodJob:
    """The job of an annotated pod."""

    # `ranks` is the annotated number; 0 without one, and `request.ranks` is then 1.
    request: PlacementRequest
    ranks: int
    # None: the job does not number its pods.
    rank: int | None
    # Problems of the annotations, for the user; invalid annotations are ignored.
    warnings: tuple[str, ...] = ()


def job_name(metadata: ObjectMetadata, namespace: str = "") -> str:
    """Return kube:NAMESPACE/KIND/NAME, as kubectl writes KIND/NAME. namespace: used if the pod has none yet."""
    labels, owner = metadata.labels or {}, _controller(metadata)
    found = next(((labels[label], kind) for label, kind in _JOB_LABELS if labels.get(label)), None)
    if found is not None:
        name, kind = found[0], found[1] or owner[0] or "trainingjob"
    elif owner[1]:
        kind, name = owner
    else:
        kind, name = _SINGLE_POD, metadata.name
    return f"{KUBE}{metadata.namespace or namespace}/{kind}/{name}"


def parse_pod_job(pod: Pod) -> tuple[PodJob | None, tuple[str, ...]]:
    """Return the pod's job, and warnings about its annotations. The job is None without an annotation that names a
    dataset. Raises nothing."""
    annotations = pod.metadata.annotations or {}
    if DATASET not in annotations:
        return None, ()
    warnings: list[str] = []
    policy = _policy(annotations.get(POLICY, ""), warnings)
    copies = _number(annotations, JOBS_PER_COPY, MAX_JOBS_PER_COPY, warnings)
    ranks = _number(annotations, RANKS, MAX_RANKS, warnings)
    name = job_name(pod.metadata)
    is_alone = name.split("/")[1] == _SINGLE_POD
    if is_alone:
        ranks = 1
    values = {
        "job": name, "dataset": annotations[DATASET].strip(), "policy": policy,
        "max_jobs_per_copy": copies, "ranks": max(1, ranks), "user": pod.metadata.namespace,
        "priority": pod.spec.priority or 0,
    }  # fmt: skip
    try:
        request = msgspec.convert(values, PlacementRequest, strict=False)
    except msgspec.ValidationError:
        shown = annotations[DATASET][:_MAX_SHOWN]
        warnings.append(f"annotation {DATASET}: expected NAME, NAME@SNAPSHOT or NAME@latest, not {shown!r}")
        return None, tuple(warnings)
    return PodJob(request, ranks, 0 if is_alone else _rank(pod.metadata), tuple(warnings)), tuple(warnings)


def is_gated(pod: Pod) -> bool:
    """Return whether the cachefs gate keeps the pod from being scheduled."""
    return any(gate.name == GATE for gate in pod.spec.gates or ())


def _controller(metadata: ObjectMetadata) -> tuple[str, str]:
    owner = next((owner for owner in metadata.owners or () if owner.controller), None)
    return (owner.kind.lower(), owner.name) if owner is not None else ("", "")


def _policy(text: str, warnings: list[str]) -> PlacementPolicy:
    try:
        return PlacementPolicy(text.strip().lower()) if text.strip() else PlacementPolicy.PREFER
    except ValueError:
        known = ", ".join(policy.value for policy in PlacementPolicy)
        warnings.append(
            f"annotation {POLICY}: expected one of {known}, not {text[:_MAX_SHOWN]!r}; {PlacementPolicy.PREFER} is used"
        )
        return PlacementPolicy.PREFER


def _number(annotations: dict[str, str], name: str, most: int, warnings: list[str]) -> int:
    """Return a number, or 0 if it is absent or invalid."""
    text = annotations.get(name, "").strip()
    if not text:
        return 0
    if text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and 1 <= int(text) <= most:
        return int(text)
    warnings.append(
        f"annotation {name}: expected a whole number from 1 to {most:,}, not {text[:_MAX_SHOWN]!r}; it is ignored"
    )
    return 0


def _rank(metadata: ObjectMetadata) -> int | None:
    for known in (metadata.labels or {}, metadata.annotations or {}):
        for name in _RANK_LABELS:
            text = known.get(name, "")
            if text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) < MAX_RANKS:
                return int(text)
    return None
