"""What kube-scheduler and the API server send, as far as this service reads it, and what they are answered.

Fields of the extender's own messages have the names of the Go fields, since types.go gives them no others; pods and
nodes in them are written as everywhere in Kubernetes. Unknown fields are skipped without being built.
"""

from typing import Any, Final

import msgspec

# Pods and nodes have names of up to 253 characters. What is longer is none.
MOST_NAME: Final = 253


class Owner(msgspec.Struct, frozen=True):
    """An entry of ownerReferences."""

    kind: str = ""
    name: str = ""
    controller: bool | None = None


class Metadata(msgspec.Struct, frozen=True):
    """What every object has. Go writes empty maps and lists as null, or not at all."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = msgspec.field(name="resourceVersion", default="")
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owners: list[Owner] | None = msgspec.field(name="ownerReferences", default=None)
    # As 2026-01-31T12:00:00Z.
    created: str | None = msgspec.field(name="creationTimestamp", default=None)


class Gate(msgspec.Struct, frozen=True):
    """An entry of schedulingGates."""

    name: str = ""


class PodSpec(msgspec.Struct, frozen=True):
    """Of a pod's spec."""

    node: str = msgspec.field(name="nodeName", default="")
    gates: list[Gate] | None = msgspec.field(name="schedulingGates", default=None)
    priority: int | None = None
    # Not decoded: extenders need not know what is in it.
    affinity: msgspec.Raw = msgspec.Raw(b"null")


class PodStatus(msgspec.Struct, frozen=True):
    """Of a pod's status."""

    phase: str = ""


class Pod(msgspec.Struct, frozen=True):
    """A pod."""

    metadata: Metadata = Metadata()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class NodeMetadata(msgspec.Struct, frozen=True):
    """Of a node's metadata."""

    name: str


class Node(msgspec.Struct, frozen=True):
    """A node."""

    metadata: NodeMetadata


class NodeList(msgspec.Struct, frozen=True):
    """What `Nodes` is."""

    items: list[Node] | None = None


class ExtenderArgs(msgspec.Struct, frozen=True):
    """What /filter and /prioritize are asked. Of the last two, one is null."""

    pod: Pod | None = msgspec.field(name="Pod", default=None)
    nodes: NodeList | None = msgspec.field(name="Nodes", default=None)
    node_names: list[str] | None = msgspec.field(name="NodeNames", default=None)


class RawNodeList(msgspec.Struct, frozen=True):
    """Nodes as they came, to be given back."""

    metadata: msgspec.Raw = msgspec.Raw(b"{}")
    items: list[msgspec.Raw] | None = None


class RawNodes(msgspec.Struct, frozen=True):
    """The part of ExtenderArgs that /filter gives back."""

    nodes: RawNodeList | None = msgspec.field(name="Nodes", default=None)


class FilterResult(msgspec.Struct, frozen=True):
    """ExtenderFilterResult. kube-scheduler looks at `Nodes` or at `NodeNames`, as it is configured, and takes an absent
    one for no nodes: the answer has the one that the question had."""

    nodes: msgspec.Raw | None = msgspec.field(name="Nodes", default=None)
    node_names: list[str] | None = msgspec.field(name="NodeNames", default=None)
    failed: dict[str, str] = msgspec.field(name="FailedNodes", default_factory=dict)
    # Nodes that eviction of other pods makes no better, so kube-scheduler evicts nobody there. 1.20 skips this field.
    unresolvable: dict[str, str] = msgspec.field(name="FailedAndUnresolvableNodes", default_factory=dict)
    error: str = msgspec.field(name="Error", default="")


class HostPriority(msgspec.Struct, frozen=True):
    """An entry of HostPriorityList."""

    host: str = msgspec.field(name="Host")
    score: int = msgspec.field(name="Score")


class AdmissionRequest(msgspec.Struct, frozen=True):
    """Of an AdmissionReview's request."""

    uid: str
    namespace: str = ""
    operation: str = ""
    object: Pod | None = None


class AdmissionReview(msgspec.Struct, frozen=True):
    """admission.k8s.io/v1, as it is asked."""

    request: AdmissionRequest
    api_version: str = msgspec.field(name="apiVersion", default="")
    kind: str = ""


def review_answer(uid: str, patch: str | None, warnings: list[str]) -> dict[str, Any]:
    """An AdmissionReview that lets the pod in. patch: a JSONPatch in base64."""
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if patch is not None:
        response |= {"patchType": "JSONPatch", "patch": patch}
    if warnings:
        response["warnings"] = warnings
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
