"""This node's identity: an id that stays with its state directory, and an incarnation that is new at each start.

An address identifies neither: it may be given to another machine, and a node may return at another one.
"""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs.errors import ConfigError
from cachefs.planning.cluster.rendezvous import weight_of
from cachefs_cluster.membership.view import NodeRecord, is_id
from cachefs_cluster.section import ClusterSection

FILE_NAME: Final = "node"
_SAFE_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """A node's id and incarnation, each of 16 hex digits."""

    id: str
    incarnation: str


def load_identity(state_dir: Path) -> NodeIdentity:
    """Load the node's id, which a first start makes. Raises ConfigError if the file is damaged or cannot be made."""
    path = state_dir / FILE_NAME
    try:
        node_id = _read_id(path) or _make_id(path)
    except OSError as error:
        raise ConfigError(f"{path}, the id of this node in its cluster, cannot be used: {error.strerror}") from None
    if not is_id(node_id):
        raise ConfigError(
            f"{path} is damaged: it does not hold 16 hex digits. Remove it, and this node gets a new id; its cluster "
            "then treats it as another node"
        )
    return NodeIdentity(node_id, secrets.token_hex(8))


def _read_id(path: Path) -> str:
    """Return the content of the file; "" without a file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _SAFE_FLAGS)
    except FileNotFoundError:
        return ""
    try:
        return os.read(descriptor, 64).decode("ascii", "replace").strip() or "nothing"
    finally:
        os.close(descriptor)


def _make_id(path: Path) -> str:
    """Make a new id, and sync it to disk."""
    node_id = secrets.token_hex(8)
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE_FLAGS, 0o640)
    try:
        os.write(descriptor, node_id.encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fresh.rename(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return node_id


def make_own_record(section: ClusterSection, identity: NodeIdentity, memory: int, ssd: int) -> NodeRecord:
    """Return this node's record. memory, ssd: bytes that its tiers may take."""
    port = section.listen_addresses[0][1]
    return NodeRecord(
        identity.id,
        identity.incarnation,
        section.own_name,
        section.advertised_hosts[0],
        port,
        port + 1,
        zone=section.zone,
        weight=section.weight or weight_of(memory + ssd),
        memory=memory,
        ssd=ssd,
        cluster=section.cluster,
        rails=section.advertised_hosts[1:],
    )
