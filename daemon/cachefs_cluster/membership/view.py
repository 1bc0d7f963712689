"""A node's view of its cluster at one moment: records of nodes, and which of them count for placement."""

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal

import msgspec

from cachefs.planning.requests.rails import MAX_RAILS

# Raised if nodes of two releases would misunderstand each other.
PROTOCOL: Final = 1
# Most bytes of a record; one has some 300.
MAX_RECORD: Final = 4096
_ID: Final = re.compile(r"[0-9a-f]{16}")
_TEXT: Final = re.compile(r"[\w.:%+@/-]*")  # names, hosts, zones: printable, and safe in log lines
_MAX_TEXT: Final = 253  # a DNS name
_MAX_BYTES: Final = 1 << 60

# joining: asks others, and nothing is placed on it yet. draining: is asked, and nothing is placed on it any more. away:
# unreachable, or without a record; it is not asked, and keeps its place until `[cluster] grace` is over.
State = Literal["joining", "active", "draining", "away"]


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node of the cluster, as it describes itself."""

    # 16 hex digits, the same for as long as the node keeps its state directory.
    id: str
    # 16 hex digits, different at each start of its daemon. "": unknown (a static list has none).
    incarnation: str
    name: str
    # Address for other nodes.
    host: str
    data_port: int
    control_port: int
    zone: str = ""
    # Its share of the blocks, relative to those of other nodes.
    weight: float = 1.0
    # Bytes that its tiers may take; 0 and 0 if unknown.
    memory: int = 0
    ssd: int = 0
    protocol: int = PROTOCOL
    state: State = "joining"
    # Name of its cluster; "": the node's release does not name it, or the record is one of a ring.
    cluster: str = ""
    # Further hosts of its data plane, with the same port: one for each further network card. Nodes of the last release
    # ignore them, and messages other than blocks go to `host` alone.
    rails: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """HOST:PORT of its data plane."""
        return format_address(self.host, self.data_port)

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts of its data plane, `host` first."""
        return tuple(dict.fromkeys((self.host, *self.rails)))

    def at(self, host: str) -> "NodeRecord":
        """Return the record of the node as if *host* were its only address."""
        return replace(self, host=host, rails=())


def format_address(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def encode_record(record: NodeRecord) -> bytes:
    """Encode a record as JSON, for a store that people look into."""
    return msgspec.json.encode(record)


_RECORD: Final = msgspec.json.Decoder(NodeRecord)


def decode_record(text: bytes) -> NodeRecord:
    """Decode and check a record. Raises ValueError, in words: other writers to a store may write anything."""
    if len(text) > MAX_RECORD:
        raise ValueError(f"{len(text):,} bytes; a record has at most {MAX_RECORD:,}")
    record = _RECORD.decode(text)  # raises msgspec's errors, which are ValueErrors
    check_record(record)
    return record


def check_record(record: NodeRecord) -> None:
    """Raise ValueError, in words, for invalid values."""
    if not is_id(record.id):
        raise ValueError("its id is not 16 hex digits")
    if record.incarnation and not is_id(record.incarnation):
        raise ValueError("its incarnation is not 16 hex digits")
    if len(record.rails) >= MAX_RAILS:
        raise ValueError(f"it has more than {MAX_RAILS} addresses")
    for what, text in (
        ("name", record.name), ("host", record.host), ("zone", record.zone), ("cluster", record.cluster),
        *(("host", rail) for rail in record.rails),
    ):  # fmt: skip
        if len(text) > _MAX_TEXT or not _TEXT.fullmatch(text):
            raise ValueError(f"its {what} has invalid characters or an invalid length")
    if not record.name or not all(record.hosts):
        raise ValueError("it has no name or no host")
    if not (0 < record.data_port < 1 << 16 and 0 < record.control_port < 1 << 16):
        raise ValueError("its ports are not from 1 to 65535")
    if not (math.isfinite(record.weight) and 0 < record.weight <= 1e9):
        raise ValueError("its weight is not above 0 and up to 1e9")
    if not (0 <= record.memory <= _MAX_BYTES and 0 <= record.ssd <= _MAX_BYTES):
        raise ValueError("its tiers have invalid sizes")


def is_id(text: str) -> bool:
    """Return whether *text* has the form of a node's id or an incarnation."""
    return _ID.fullmatch(text) is not None


@dataclass(frozen=True)
class ClusterView:
    """The cluster as this node knows it. A view never changes: listen to the membership to learn of a new one."""

    # The ring epoch: differs whenever another set of nodes counts for placement. 0: unknown.
    epoch: int = 0
    # Id of this node; "" if it is in no cluster.
    me: str = ""
    # Sorted by id, with this node, unless it is in no cluster.
    members: tuple[NodeRecord, ...] = ()
    # Ids of members that count for placement, sorted.
    ring: tuple[str, ...] = ()
    # The kind of membership: none, static, etcd or kubernetes.
    source: str = "none"
    # A problem of the source, as one line, or "".
    problem: str = ""
    # Monotonic time at which the view was made.
    since: float = field(default_factory=time.monotonic)

    @cached_property
    def _by_id(self) -> dict[str, NodeRecord]:
        return {record.id: record for record in self.members}

    def get(self, node_id: str) -> NodeRecord | None:
        """Return the member with this id, or None."""
        return self._by_id.get(node_id)

    @property
    def own_record(self) -> NodeRecord | None:
        """This node's record."""
        return self._by_id.get(self.me)

    @cached_property
    def others(self) -> tuple[NodeRecord, ...]:
        """All members but this node, including those that are away."""
        return tuple(record for record in self.members if record.id != self.me)

    @cached_property
    def reachable(self) -> tuple[NodeRecord, ...]:
        """Other members that may be asked."""
        return tuple(record for record in self.others if record.state != "away")

    @cached_property
    def placed_members(self) -> tuple[NodeRecord, ...]:
        """Members that count for placement, sorted by id. Their zones, weights and sizes are the same in the views of
        all nodes of the same epoch (with a static list: once each node has heard of each)."""
        return tuple(self._by_id[each] for each in self.ring if each in self._by_id)

    @cached_property
    def available_members(self) -> tuple[NodeRecord, ...]:
        """Members that count for placement and can be asked, sorted by id: those that can hold blocks now. A node that
        cannot ask half of all considers itself cut off, and all as present until they do not count any more."""
        found = tuple(record for record in self.placed_members if record.state != "away")
        return found if 2 * len(found) >= len(self.placed_members) else self.placed_members

    def home_shares(self) -> dict[str, float]:
        """Return, by id, the share of all blocks whose home a node is, by weights."""
        total_weight = math.fsum(record.weight for record in self.placed_members)
        return {record.id: record.weight / total_weight for record in self.placed_members}

    def remarks(self) -> Iterator[str]:
        """Yield a line for each state that is possible, but hardly intended."""
        for name, count in sorted(Counter(record.name for record in self.members).items()):
            if count > 1:
                ids = ", ".join(record.id for record in self.members if record.name == name)
                yield f"{count} nodes are called {name} (ids {ids}); give each its own [cluster] name"
        published = defaultdict(list)
        for record in self.reachable:
            for host in record.hosts:
                published[format_address(host, record.data_port)].append(record.name)
        for address, nodes in sorted(published.items()):
            if (count := len(nodes)) > 1:
                names = ", ".join(nodes)
                yield f"{count} nodes publish the address {address} ({names}); a stale record expires within seconds"
        for protocol, count in sorted(Counter(record.protocol for record in self.members).items()):
            if protocol != PROTOCOL:
                yield f"{count} nodes speak protocol {protocol}, this one {PROTOCOL}: they do not exchange blocks"
