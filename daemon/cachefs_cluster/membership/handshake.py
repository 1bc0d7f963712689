"""The greeting in each request between nodes, and the addressee's verdict on it.

An address may belong to another machine by now, a node may have restarted, and two nodes may have different rings. The
verdict tells the sender which of these is the case, and what to do.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, assert_never

from cachefs_cluster.membership.secret import ClusterSecret, ProofScope, proofs_match
from cachefs_cluster.membership.view import PROTOCOL, ClusterView, NodeRecord

SECRET_HINT: Final = (
    "daemons of one cluster without certificates need one cluster.secret_file; by default those of one user share one "
    "from their start on"
)
# The purpose of a greeting, as its proof names it.
BLOCKS_SCOPE: Final = "blocks"


@dataclass(frozen=True, slots=True)
class Greeting:
    """The fields that identify sender and addressee of a request."""

    cluster: str
    # Ids of the requesting and of the addressed node.
    sender: str
    addressee: str
    # Incarnation of the addressee as the sender knows it; "" if unknown.
    incarnation: str
    # The sender's ring epoch.
    epoch: int
    protocol: int = PROTOCOL
    # 32 hex digits, and the proof that the sender knows the cluster's secret; "" without a secret.
    nonce: str = ""
    proof: str = ""

    def scope(self, addressee: str, port: int) -> ProofScope:
        """Return the scope of the greeting's proof. addressee: id of the addressed node; port: of its data plane."""
        return ProofScope(self.nonce, self.sender, addressee, self.incarnation, port, BLOCKS_SCOPE)


class Verdict(StrEnum):
    """This node's verdict on a greeting. All but WELCOME and NEWER_EPOCH refuse the request."""

    WELCOME = "welcome"
    # The sender has a newer ring than this node, which serves the request and asks its source for that ring.
    NEWER_EPOCH = "newer-epoch"
    # The sender must ask its source for the ring, and then repeat the request.
    OLD_EPOCH = "old-epoch"
    # The two nodes have different static lists: an administrator has to correct one.
    OTHER_LIST = "other-list"
    # Another node has the address now.
    OTHER_NODE = "other-node"
    # The node has restarted since the sender learned of it.
    OTHER_INCARNATION = "other-incarnation"
    OTHER_CLUSTER = "other-cluster"
    OTHER_PROTOCOL = "other-protocol"
    # The sender is no member.
    NOT_A_MEMBER = "stranger"
    # The sender does not know the cluster's secret.
    UNPROVEN = "unproven"

    @property
    def is_accepted(self) -> bool:
        """Whether the request is served."""
        return self in (Verdict.WELCOME, Verdict.NEWER_EPOCH)


def judge_greeting(view: ClusterView, cluster: str, greeting: Greeting, secret: ClusterSecret | None = None) -> Verdict:
    """Return the verdict of this node, which has *view* and is in *cluster*, on a request.

    An unknown sender may be a node that joined a moment ago: it is served if its epoch is newer than ours, and a
    stranger otherwise.
    """
    mine = view.own_record
    if greeting.cluster != cluster or mine is None:
        return Verdict.OTHER_CLUSTER
    if greeting.protocol != PROTOCOL:
        return Verdict.OTHER_PROTOCOL
    if greeting.addressee != mine.id:
        return Verdict.OTHER_NODE
    # A proof for no start in particular could be kept and used again, so it does not count.
    if greeting.incarnation not in ("", mine.incarnation) or (secret is not None and not greeting.incarnation):
        return Verdict.OTHER_INCARNATION
    if secret is not None and not _is_proven(greeting, mine, secret):
        return Verdict.UNPROVEN
    if view.source == "static":
        return _judge_by_list(view, greeting)
    if greeting.epoch > view.epoch:
        return Verdict.NEWER_EPOCH
    if view.get(greeting.sender) is None:
        return Verdict.NOT_A_MEMBER
    return Verdict.WELCOME if greeting.epoch == view.epoch else Verdict.OLD_EPOCH


def _is_proven(greeting: Greeting, mine: NodeRecord, secret: ClusterSecret) -> bool:
    return proofs_match(greeting.proof, secret.request_proof(greeting.scope(mine.id, mine.data_port)))


def _judge_by_list(view: ClusterView, greeting: Greeting) -> Verdict:
    if greeting.epoch != view.epoch:
        return Verdict.OTHER_LIST
    return Verdict.WELCOME if view.get(greeting.sender) is not None else Verdict.NOT_A_MEMBER


def explain_verdict(verdict: Verdict, view: ClusterView, cluster: str, greeting: Greeting) -> str:
    """Return a line for the logs of the sender and of this node; "" if the request is served."""
    mine = view.own_record
    here = f"{mine.name} ({mine.id})" if mine is not None else "a node that is in no cluster"
    match verdict:
        case Verdict.WELCOME | Verdict.NEWER_EPOCH:
            return ""
        case Verdict.OLD_EPOCH:
            return f"ring epoch {greeting.epoch} is old, {here} has {view.epoch}"
        case Verdict.OTHER_LIST:
            return f"{here} has another list of nodes; make cluster.nodes the same on all nodes"
        case Verdict.OTHER_NODE:
            return f"the address belongs to {here} now, not to {greeting.addressee}"
        case Verdict.OTHER_INCARNATION:
            return f"{here} has started again since"
        case Verdict.OTHER_CLUSTER:
            return f"{here} is in cluster {cluster!r}, not in {greeting.cluster!r}"
        case Verdict.OTHER_PROTOCOL:
            return f"{here} speaks protocol {PROTOCOL}, not {greeting.protocol}; give both nodes one release"
        case Verdict.NOT_A_MEMBER:
            return f"{here} knows no member {greeting.sender}"
        case Verdict.UNPROVEN:
            return f"{here} has another secret: {SECRET_HINT}"
    assert_never(verdict)
