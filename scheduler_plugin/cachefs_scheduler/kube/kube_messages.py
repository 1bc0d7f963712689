"""The messages of kube-scheduler and the API server that this service reads and writes.

Fields of the extender's messages have the names of the Go fields, since types.go declares no JSON names; pods and nodes
within them are written as everywhere in Kubernetes. Unknown fields are skipped without being built.

`decode_request` decodes requests with whole nodes (`nodeCacheCapable: false`) in pieces. Such a request of a cluster of
5,000 nodes has 10 to 60 MB, and kube-scheduler sends it twice for each pod. Decoding takes msgspec 15 to 90 ms, which
block the interpreter in any thread. So the list is cut between nodes and decoded piece by piece, with other tasks
running in between.

Go writes a node with its metadata first, and the name first in there, and escapes quotes within texts. So the text
`},{"metadata":{"name":"` occurs between two nodes and never within one. If that should not hold, some piece is invalid
JSON, and the whole request is decoded at once; pieces that can be decoded are therefore right.

`PodEvent` is an event that this service writes about a pod, and `EventLimiter` limits their rate.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

# Longest name of a pod or node.
MAX_NAME: Final = 253
# Seconds for which an identical event of a pod is suppressed. The API server forgets events after an hour.
REPEAT_SECONDS: Final = 1800.0
# Seconds for which another text with the same reason (such as a queue position) is suppressed.
SAME_REASON_SECONDS: Final = 20.0
# Events per second, and burst.
_RATE: Final = 5.0
_MAX_BURST: Final = 50.0
_MAX_REMEMBERED: Final = 50_000


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


# Bytes from which a request is read in pieces, and bytes of a piece: 1 to 2 ms.
LARGE_BYTES: Final = 1 << 20
_PIECE_BYTES: Final = 512 << 10
_FIRST: Final = b'"items":[{"metadata":{"name":"'
_BETWEEN: Final = b'},{"metadata":{"name":"'
_NODES: Final = b'"Nodes":{'
_END: Final = b"]}"

_args = msgspec.json.Decoder(ExtenderArgs)
_nodes = msgspec.json.Decoder(list[KubeNode])
_raw_nodes = msgspec.json.Decoder(list[msgspec.Raw])
_raw_args = msgspec.json.Decoder(RawNodes)


class ExtenderRequest:
    """A decoded request of kube-scheduler."""

    __slots__ = ("_body", "_pieces", "args", "names")

    def __init__(
        self, body: bytes | bytearray, args: ExtenderArgs, names: list[str], pieces: list[tuple[int, int]]
    ) -> None:
        self._body = body
        # Byte ranges of the pieces of the node list.
        self._pieces = pieces
        self.args = args
        # Names of the nodes, in either form of request.
        self.names = names

    async def nodes_without(self, refused: frozenset[str]) -> list[bytes | memoryview]:
        """Return the node list without *refused* as pieces of JSON; the original bytes if none is refused."""
        found: list[bytes | memoryview] = []
        view = memoryview(self._body)
        for begin, end in self._pieces or [(-1, -1)]:
            piece = view[begin:end] if begin >= 0 else None
            kept: bytes | memoryview
            if piece is not None and not refused:
                kept = piece
            else:
                raw = _raw_items(self._body) if piece is None else _raw_nodes.decode(_as_list(piece))
                names = [msgspec.json.decode(node, type=KubeNode).metadata.name for node in raw]
                kept = b",".join(bytes(node) for node, name in zip(raw, names, strict=True) if name not in refused)
            if len(kept):
                found += (b",", kept) if found else (kept,)
            await asyncio.sleep(0)
        return [b'{"metadata":{},"items":[', *found, b"]}"]


async def decode_request(body: bytes | bytearray) -> ExtenderRequest:
    """Decode a request. Raises msgspec.DecodeError or RecursionError."""
    if len(body) >= LARGE_BYTES and (found := await _decode_in_pieces(body)) is not None:
        return found
    args = _args.decode(body)
    if args.node_names is not None:
        return ExtenderRequest(body, args, args.node_names, [])
    return ExtenderRequest(body, args, [node.metadata.name for node in (args.nodes and args.nodes.items) or ()], [])


async def _decode_in_pieces(body: bytes | bytearray) -> ExtenderRequest | None:
    """Decode a request in pieces. Returns None if it cannot be cut."""
    nodes = body.find(_NODES)
    first = body.find(_FIRST, nodes) if nodes >= 0 else -1
    last = body.rfind(_END)
    if first < 0 or last < first:
        return None
    begin = first + len(b'"items":[')
    names: list[str] = []
    pieces: list[tuple[int, int]] = []
    try:
        args = _args.decode(body[:begin] + body[last:])
        while begin < last:
            cut = body.find(_BETWEEN, begin + _PIECE_BYTES, last)
            end = cut + 1 if cut >= 0 else last
            names += [node.metadata.name for node in _nodes.decode(_as_list(memoryview(body)[begin:end]))]
            pieces.append((begin, end))
            begin = end + 1
            await asyncio.sleep(0)
    except (msgspec.DecodeError, RecursionError):
        return None
    return ExtenderRequest(body, args, names, pieces) if args.nodes is not None and not args.nodes.items else None


def _as_list(piece: memoryview) -> bytes:
    return b"[" + piece + b"]"


def _raw_items(body: bytes | bytearray) -> list[msgspec.Raw]:
    nodes = _raw_args.decode(body).nodes
    return list((nodes.items if nodes is not None else None) or ())


@dataclass(frozen=True, slots=True)
class PodEvent:
    """An event about a pod, for `kubectl describe pod`."""

    pod: ObjectMetadata
    reason: str
    text: str
    type: Literal["Normal", "Warning"] = "Normal"


class EventLimiter:
    """Limits and deduplicates events. `now`: monotonic seconds."""

    def __init__(self) -> None:
        # By uid and reason: text and time.
        self._written: dict[tuple[str, str], tuple[str, float]] = {}
        self._tokens = _MAX_BURST
        self._refilled_at = 0.0

    def can_write(self, note: PodEvent, now: float) -> bool:
        """Return whether the event is new and within the rate limit."""
        key = (note.pod.uid, note.reason)
        text, at = self._written.get(key, ("", -REPEAT_SECONDS))
        if now - at < (REPEAT_SECONDS if text == note.text else SAME_REASON_SECONDS):
            return False
        self._tokens = min(_MAX_BURST, self._tokens + max(0.0, now - self._refilled_at) * _RATE)
        self._refilled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        if len(self._written) >= _MAX_REMEMBERED:
            self._written = {key: last for key, last in self._written.items() if now - last[1] < SAME_REASON_SECONDS}
        self._written[key] = (note.text, now)
        return True
