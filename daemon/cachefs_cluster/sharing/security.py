"""Authentication of the control endpoint and its clients. The caller provides the TLS contexts."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cachefs_cluster.membership.secret import ClusterSecret
from cachefs_cluster.membership.view import NodeRecord

# Returns why the other end of a connection is refused, or "". Arguments: the connection's `ssl_object` (None without
# TLS), and the node that the other end claims, or is expected, to be (None: any).
FindRefusal = Callable[[Any, NodeRecord | None], str]


# Returns the names in the other end's certificate, in lower case, given its `ssl_object`; None without TLS.
FindNames = Callable[[Any], frozenset[str] | None]


def _no_names(ssl_object: Any) -> frozenset[str] | None:
    return None


def _no_refusal(ssl_object: Any, node: NodeRecord | None) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class ConnectionSecurity:
    """TLS contexts, checks and the secret. Without contexts there is no TLS."""

    server: ssl.SSLContext | None = None
    # Returns the context of the next connection.
    client: Callable[[], ssl.SSLContext] | None = None
    refusal: FindRefusal = _no_refusal
    names: FindNames = _no_names
    # The secret that nodes without TLS prove to each other; None: no proofs.
    secret: ClusterSecret | None = None


INSECURE = ConnectionSecurity()
