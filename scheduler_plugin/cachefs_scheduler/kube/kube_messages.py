"""The messages of kube-scheduler and the API server that this service reads and writes.

Fields of the extender's messages have the names of the Go fields, since types.go declares no JSON names; pods and nodes
within them are written as everywhere in Kubernetes. Unknown fields are skipped without being built.
"""

from typing import Any, Final

import msgspec

# Longest name of a pod or node.
MAX_NAME: Final = 253


class OwnerReference(msgspec.Struct, frozen=True):
    """An entry of ownerReferences."""

    kind: str = ""
    name: str = ""
    controller: bool | None = None


class ObjectMetadata(msgspec.Struct, frozen=True):
    """Metadata of any object. Go writes empty maps and lists as null, or omits them."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = msgspec.field(name="resourceVersion", default="")
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owners: list[OwnerReference] | None = msgspec.field(name="ownerReferences", default=None)
    # For example 2026-01-31T12:00:00Z.
    created: str | None = msgspec.field(name="creationTimestamp", default=None)


class SchedulingGate(msgspec.Struct, frozen=True):
    """An entry of schedulingGates."""

    name: str = ""


class PodSpec(msgspec.Struct, frozen=True):
    """The fields of a pod's spec that are read."""

    node: str = msgspec.field(name="nodeName", default="")
    gates: list[SchedulingGate] | None = msgspec.field(name="schedulingGates", default=None)
    priority: int | None = None
    # Not decoded: only `admission_webhook` needs the contents.
    affinity: msgspec.Raw = msgspec.Raw(b"null")


class PodStatus(msgspec.Struct, frozen=True):
    """The fields of a pod's status that are read."""

    phase: str = ""


class Pod(msgspec.Struct, frozen=True):
    """A pod."""

    metadata: ObjectMetadata = ObjectMetadata()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class NodeMetadata(msgspec.Struct, frozen=True):
    """The fields of a node's metadata that are read."""

    name: str


class KubeNode(msgspec.Struct, frozen=True):
    """A node."""

    metadata: NodeMetadata


class NodeList(msgspec.Struct, frozen=True):
    """The value of `NodeNumbers`."""

    items: list[KubeNode] | None = None


class ExtenderArgs(msgspec.Struct, frozen=True):
    """The request of /filter and /prioritize. One of `NodeNumbers` and `NodeNames` is null."""

    pod: Pod | None = msgspec.field(name="Pod", default=None)
    nodes: NodeList | None = msgspec.field(name="Nodes", default=None)
    node_names: list[str] | None = msgspec.field(name="NodeNames", default=None)


class RawNodeList(msgspec.Struct, frozen=True):
    """Undecoded nodes, to be sent back."""

    metadata: msgspec.Raw = msgspec.Raw(b"{}")
    items: list[msgspec.Raw] | None = None


class RawNodes(msgspec.Struct, frozen=True):
    """The part of ExtenderArgs that /filter sends back."""

    nodes: RawNodeList | None = msgspec.field(name="Nodes", default=None)


class FilterResult(msgspec.Struct, frozen=True):
    """ExtenderFilterResult. kube-scheduler reads `NodeNumbers` or `NodeNames`, depending on its configuration, and
    takes an absent field for no nodes: the answer fills the field that the request had."""

    nodes: msgspec.Raw | None = msgspec.field(name="Nodes", default=None)
    node_names: list[str] | None = msgspec.field(name="NodeNames", default=None)
    failed: dict[str, str] = msgspec.field(name="FailedNodes", default_factory=dict)
    # Nodes where preemption does not help, so kube-scheduler evicts no pods there. Version 1.20 skips this field.
    unresolvable: dict[str, str] = msgspec.field(name="FailedAndUnresolvableNodes", default_factory=dict)
    error: str = msgspec.field(name="Error", default="")


class HostPriority(msgspec.Struct, frozen=True):
    """An entry of HostPriorityList."""

    host: str = msgspec.field(name="Host")
    score: int = msgspec.field(name="Score")


class AdmissionRequest(msgspec.Struct, frozen=True):
    """The request within an AdmissionReview."""

    uid: str
    namespace: str = ""
    operation: str = ""
    object: Pod | None = None


class AdmissionReview(msgspec.Struct, frozen=True):
    """An AdmissionReview request (admission.k8s.io/v1)."""

    request: AdmissionRequest
    api_version: str = msgspec.field(name="apiVersion", default="")
    kind: str = ""


def review_response(uid: str, patch: str | None, warnings: list[str]) -> dict[str, Any]:
    """Return an AdmissionReview that admits the pod. patch: a JSONPatch in base64."""
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if patch is not None:
        response |= {"patchType": "JSONPatch", "patch": patch}
    if warnings:
        response["warnings"] = warnings
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
