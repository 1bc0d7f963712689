"""Who this node is: an id that stays with its state directory, and an incarnation that is new at each start.

An address says neither: it may be given to another machine, and a node may come back at another one.
"""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs.errors import ConfigError
from cachefs.planning.cluster.rendezvous import weight_of
from cachefs_daemon.cluster.view import NodeRecord, is_id
from cachefs_daemon.cluster_section import ClusterSection

FILE_NAME: Final = "node"
_SAFELY: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Identity:
    """Two texts of 16 hex digits."""

    id: str
    incarnation: str


def load_identity(state_dir: Path) -> Identity:
    """The node's, of which a first start makes the id. Raises ConfigError where the file is damaged or cannot be
    made."""
    path = state_dir / FILE_NAME
    try:
        node_id = _read(path) or _make(path)
    except OSError as error:
        raise ConfigError(f"{path}, the id of this node in its cluster, cannot be used: {error.strerror}") from None
    if not is_id(node_id):
        raise ConfigError(
            f"{path} is damaged: it holds no 16 hex digits. Remove it, and this node has a new id; its cluster then "
            "takes it for another node"
        )
    return Identity(node_id, secrets.token_hex(8))


def _read(path: Path) -> str:
    """What is in the file; empty where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _SAFELY)
    except FileNotFoundError:
        return ""
    try:
        return os.read(descriptor, 64).decode("ascii", "replace").strip() or "nothing"
    finally:
        os.close(descriptor)


def _make(path: Path) -> str:
    """A new id, which survives a power cut from now on."""
    node_id = secrets.token_hex(8)
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o640)
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


def own_record(section: ClusterSection, identity: Identity, memory: int, ssd: int) -> NodeRecord:
    """What this node says of itself. memory, ssd: bytes that its tiers may take."""
    port = section.listens[1]
    return NodeRecord(
        identity.id,
        identity.incarnation,
        section.own_name,
        section.advertised,
        port,
        port + 1,
        zone=section.zone,
        weight=section.weight or weight_of(memory + ssd),
        memory=memory,
        ssd=ssd,
        cluster=section.cluster,
    )
