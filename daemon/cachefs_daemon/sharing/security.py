"""How the control endpoint and its clients prove who they are. Whoever reads the certificates gives the contexts."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cachefs_daemon.cluster.secret import ClusterSecret
from cachefs_daemon.cluster.view import NodeRecord

# Why this connection's other end is not to be talked to; empty where it is. It is told the `ssl_object` of the
# connection (None: there is no TLS), and which node the other end says, or is meant, to be (None: it may be any).
Refusal = Callable[[Any, NodeRecord | None], str]


# Whom the certificate of a connection's other end names, in small letters, told its `ssl_object`; None: there is no
# TLS.
Names = Callable[[Any], frozenset[str] | None]


def _no_names(ssl_object: Any) -> frozenset[str] | None:
    return None


def _no_refusal(ssl_object: Any, node: NodeRecord | None) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Security:
    """Without contexts there is no TLS."""

    server: ssl.SSLContext | None = None
    # Gives the context of the next connection.
    client: Callable[[], ssl.SSLContext] | None = None
    refusal: Refusal = _no_refusal
    names: Names = _no_names
    # What nodes without TLS prove to each other that they know; None: nothing.
    secret: ClusterSecret | None = None


INSECURE = Security()
