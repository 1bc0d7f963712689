"""The mutating webhook: gives annotated pods a scheduling gate (`suspend`), or preferred node affinity in clusters
whose scheduler cannot be configured.

Patches are idempotent: they add only what is missing. Pods without the annotation are admitted unchanged, and so is
every pod for which an error occurs. The webhook keeps no state, since the API server also calls it for pods that are
never created, as with `kubectl apply --dry-run=server`.
"""

import base64
import heapq
import logging
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from cachefs.scheduling_messages import PlacementPolicy
from cachefs_scheduler.advisor_interface import AdvisorInterface
from cachefs_scheduler.kube.kube_messages import AdmissionRequest, AdmissionReview, ObjectMetadata, Pod, review_response
from cachefs_scheduler.kube.pod_job import DATASET, GATE, PodJob, parse_pod_job

log = logging.getLogger(__name__)

AFFINITY_MARK: Final = "cachefs.io/affinity"
# Nodes in a pod's affinity. Each node is a term, since `metadata.name` takes one value.
MAX_TERMS: Final = 32
# Weights go from 1 to 100.
_WEIGHT: Final = 100
_PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"

# A valid node name of Kubernetes. The API server would refuse a pod with another name, which daemons outside of the
# cluster may have.
_NODE: Final = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")

Patch = list[dict[str, Any]]


class AdmissionWebhook:
    """Answers AdmissionReviews. Used on the event loop."""

    def __init__(self, advisor: AdvisorInterface, can_open_gates: Callable[[], bool] = lambda: True) -> None:
        """can_open_gates: returns whether a service now follows pods and would open their gates."""
        self._advisor = advisor
        self._can_open_gates = can_open_gates

    def review_pod(self, review: AdmissionReview, *, affinity: bool) -> dict[str, Any]:
        """Return the AdmissionReview response. affinity: add node affinity too."""
        request = review.request
        pod = request.object
        # Kubernetes accepts gates only at a pod's creation.
        if request.operation != "CREATE" or pod is None or DATASET not in (pod.metadata.annotations or {}):
            return review_response(request.uid, None, [])
        try:
            patch, warnings = self._patch(_in_namespace(pod, request), affinity=affinity)
        except Exception as error:
            log.error("webhook: internal error, the pod is admitted unchanged", exc_info=error)
            patch, warnings = (
                [],
                ["cachefs: internal error of cachefs-scheduler; the pod is scheduled without its advice"],
            )
        encoded = base64.b64encode(msgspec.json.encode(patch)).decode() if patch else None
        return review_response(request.uid, encoded, [f"cachefs: {text}" for text in warnings])

    def _patch(self, pod: Pod, *, affinity: bool) -> tuple[Patch, list[str]]:
        job, warnings = parse_pod_job(pod)
        patch: Patch = []
        if job is not None:
            if job.request.policy == PlacementPolicy.SUSPEND and self._can_open_gates():
                patch += _add_gate(pod)
            elif job.request.policy == PlacementPolicy.SUSPEND:
                # A gate that no service opens would hold the pod forever.
                warnings = (
                    *warnings,
                    "the pod does not wait: cachefs-scheduler does not follow pods now (see kube.api)",
                )
            if affinity:
                patch += self._affinity(pod, job)
        return patch, list(warnings)

    def _affinity(self, pod: Pod, job: PodJob) -> Patch:
        annotations = pod.metadata.annotations or {}
        if AFFINITY_MARK in annotations or pod.spec.node:
            return []
        scores = self._advisor.rank(job.request, None).scores
        known = (item for item in scores.items() if item[1] > 0 and _NODE.fullmatch(item[0]))
        best = heapq.nlargest(MAX_TERMS, known, key=lambda item: item[1])
        if not best:
            return []
        terms = [_term(node, score) for node, score in best]
        there = msgspec.json.decode(pod.spec.affinity)
        return [
            *_add_terms(there, terms),
            {"op": "add", "path": f"/metadata/annotations/{_pointer_escaped(AFFINITY_MARK)}", "value": "written"},
        ]


def _add_gate(pod: Pod) -> Patch:
    gates = pod.spec.gates
    if pod.spec.node or any(gate.name == GATE for gate in gates or ()):
        return []
    if not gates:
        return [{"op": "add", "path": "/spec/schedulingGates", "value": [{"name": GATE}]}]
    return [{"op": "add", "path": "/spec/schedulingGates/-", "value": {"name": GATE}}]


def _term(node: str, score: float) -> dict[str, Any]:
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {"weight": max(1, min(_WEIGHT, round(score * _WEIGHT))), "preference": {"matchFields": [field]}}


def _add_terms(there: Any, terms: list[dict[str, Any]]) -> Patch:
    """Return JSONPatch operations that add *terms*: JSONPatch does not create missing parents."""
    if not isinstance(there, dict):
        return [{"op": "add", "path": "/spec/affinity", "value": {"nodeAffinity": {_PREFERRED: terms}}}]
    node_affinity = there.get("nodeAffinity")
    if not isinstance(node_affinity, dict):
        return [{"op": "add", "path": "/spec/affinity/nodeAffinity", "value": {_PREFERRED: terms}}]
    own = node_affinity.get(_PREFERRED)
    path = f"/spec/affinity/nodeAffinity/{_PREFERRED}"
    if not isinstance(own, list):
        return [{"op": "add", "path": path, "value": terms}]
    return [{"op": "add", "path": f"{path}/-", "value": term} for term in terms]


def _pointer_escaped(name: str) -> str:
    """Escape a name for a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _in_namespace(pod: Pod, request: AdmissionRequest) -> Pod:
    """Fill in the pod's namespace: a pod that is being created may lack one (and its name, if that is generated)."""
    metadata: ObjectMetadata = msgspec.structs.replace(
        pod.metadata, namespace=pod.metadata.namespace or request.namespace
    )
    return msgspec.structs.replace(pod, metadata=metadata)
