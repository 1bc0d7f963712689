"""[cluster] of the configuration: membership, the source of the node list, addresses, and security between nodes."""

import ipaddress
import os
import re
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from cachefs.planning.requests.rails import MAX_RAILS
from cachefs_daemon.section import ClusterTable, DefaultText, OptionalPath, Seconds, Size

DEFAULT_PORT: Final = 7380
MAX_NODES: Final = 4096
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HOST: Final = re.compile(r"[A-Za-z0-9._:%-]{1,253}")
_PREFIX: Final = re.compile(r"(/[A-Za-z0-9._-]+){1,16}")
_VARIABLE: Final = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")


@dataclass(frozen=True, slots=True)
class StaticNode:
    """A node of a static list."""

    name: str
    host: str
    port: int
    zone: str = ""
    weight: float = 1.0


def _from_environment(value: object) -> object:
    """Replace a value such as "$POD_IP" by that environment variable, so that one file serves all nodes."""
    found = _VARIABLE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return value
    if not (content := os.environ.get(found[1], "")):
        raise ValueError(f"the environment has no variable {found[1]}")
    return content


def _check_name(value: str) -> str:
    if value and not _NAME.fullmatch(value):
        raise ValueError("expected up to 63 letters, digits, dots, dashes and underscores")
    return value


def _check_host(value: str) -> str:
    if value and not _HOST.fullmatch(value):
        raise ValueError('expected the name or the address of a host, without a port, such as "10.0.0.5"')
    return value


def split_address(text: str) -> tuple[str, int]:
    """Split HOST:PORT or [HOST]:PORT. Raises ValueError with the expected format."""
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    clear = bare == host or ":" in bare
    if not (_HOST.fullmatch(bare) and clear and (":" not in bare or bare != host) and port.isdecimal()):
        raise ValueError(f'expected HOST:PORT, such as "10.0.0.5:{DEFAULT_PORT}" or "[fd00::5]:{DEFAULT_PORT}"')
    if not 0 < int(port[:6]) < (1 << 16) - 1:
        raise ValueError("expected a port from 1 to 65534; the one after it is used too")
    return bare, int(port)


def _check_address(value: str) -> str:
    split_address(value)
    return value


def parse_static_node(text: str) -> StaticNode:
    """Parse one entry of `cluster.nodes`. Raises ValueError with the expected format."""
    first, *options = (part.strip() for part in text.split(","))
    name, separator, address = first.partition("=")
    if not separator or not name or not _NAME.fullmatch(name):
        raise ValueError(f'expected NAME=HOST:PORT, such as "gpu1=10.0.0.5:{DEFAULT_PORT}"')
    host, port = split_address(address)
    zone, weight = "", 1.0
    for option in options:
        key, _, value = option.partition("=")
        if key == "zone":
            zone = _check_name(value)
        elif key == "weight":
            weight = _parse_weight(value)
        else:
            raise ValueError(f"{option!r} is unknown; after the address there may be zone=NAME and weight=NUMBER")
    return StaticNode(name, host, port, zone, weight)


def _parse_weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight <= 1e6:
        raise ValueError(f"expected a weight above 0 and up to a million, not {text!r}")
    return weight


def _check_static_node(value: str) -> str:
    parse_static_node(value)
    return value


def _normalize_endpoint(value: str) -> str:
    try:
        url = urlsplit(value)
        port = url.port or 2379
    except ValueError:  # the port is no number from 0 to 65535
        raise ValueError('expected a URL such as "https://10.0.0.2:2379"') from None
    plain = not (url.username or url.password or url.query or url.fragment or url.path.strip("/"))
    if url.scheme not in ("http", "https") or not url.hostname or not _HOST.fullmatch(url.hostname) or not plain:
        raise ValueError('expected a URL such as "https://10.0.0.2:2379"')
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{url.scheme}://{host}:{port}"


def _as_list(value: object) -> object:
    """Make a list of a single value."""
    return (value,) if isinstance(value, str) else value


def _without_empty(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the hosts that are named: an empty text names none."""
    return tuple(host for host in hosts if host)


def _check_prefix(value: str) -> str:
    if value and (not _PREFIX.fullmatch(value) or len(value) > 255):
        raise ValueError('expected a prefix of keys such as "/cachefs/training"')
    return value


Name = Annotated[str, BeforeValidator(_from_environment), AfterValidator(_check_name)]
Host = Annotated[str, BeforeValidator(_from_environment), AfterValidator(_check_host)]
Address = Annotated[str, AfterValidator(_check_address)]
# One value, or a list of them.
Addresses = Annotated[tuple[Address, ...], Field(min_length=1, max_length=MAX_RAILS), BeforeValidator(_as_list)]
Hosts = Annotated[
    tuple[Host, ...], Field(max_length=MAX_RAILS), BeforeValidator(_as_list), AfterValidator(_without_empty)
]
ListedNode = Annotated[str, AfterValidator(_check_static_node)]
Endpoint = Annotated[str, AfterValidator(_normalize_endpoint)]
Observer = Annotated[str, Field(min_length=1), AfterValidator(_check_host)]


class ClusterSection(ClusterTable):
    """[cluster]: several nodes that share one cache."""

    membership: Literal["none", "static", "etcd", "kubernetes"] = Field(
        default="none",
        description="how nodes find each other: `none` (the node is alone), `static` (the list in `nodes`), `etcd`, or "
        "`kubernetes` (Leases)",
    )
    cluster: Annotated[str, Field(min_length=1), AfterValidator(_check_name)] = Field(
        default="default", description="name of the cluster; nodes of another one are refused"
    )
    name: Annotated[Name, DefaultText("the host's name")] = Field(
        default="",
        description="the name of this node: up to 63 letters, digits, dots, dashes and underscores. With certificates, "
        'the name in the node\'s certificate. `name`, `zone` and `advertise` may be `"$VARIABLE"`: the value of the '
        "environment variable, so one file serves all pods of a DaemonSet",
    )
    zone: Name = Field(
        default="",
        description="a rack or an availability zone. Second copies (`replicas`) go to another one",
    )
    listen: Annotated[Addresses, DefaultText("`127.0.0.1:7380`", f'"127.0.0.1:{DEFAULT_PORT}"')] = Field(
        default=(f"127.0.0.1:{DEFAULT_PORT}",),
        description="HOST:PORT where other nodes get blocks; the next port, on the first host, is for all other "
        "messages between nodes. A node with several network cards has a list, such as "
        f'`["10.0.0.5:{DEFAULT_PORT}", "10.0.1.5:{DEFAULT_PORT}"]`, all with one port\n\n'
        "[What several cards take](operations.md#several-network-cards)",
    )
    advertise: Annotated[Hosts, DefaultText("hosts of `listen`", '""')] = Field(
        default=(),
        description="the host under which other nodes reach this node, if it differs from that of `listen`, or "
        "`listen` is `0.0.0.0`; a list, one host for each network card, where there are several",
    )
    nodes: Annotated[tuple[ListedNode, ...], Field(max_length=MAX_NODES)] = Field(
        default=(),
        description='with `static`: all nodes, this one too, the same on all: `"NAME=HOST:PORT"`, behind which '
        "there may be `, zone=NAME` and `, weight=NUMBER`",
    )
    etcd: Annotated[tuple[Endpoint, ...], Field(max_length=16)] = Field(
        default=(),
        description='with `etcd`: URLs of its endpoints, such as `"https://10.0.0.2:2379"`, all `http://` or all '
        "`https://`. One that answers is enough",
    )
    prefix: Annotated[str, AfterValidator(_check_prefix), DefaultText("`/cachefs/` and the cluster's name")] = Field(
        default="", description="with `etcd`: prefix of the keys"
    )
    etcd_user: str = Field(default="", description="with `etcd`: the user, if etcd asks for user and password")
    etcd_password_file: OptionalPath = Field(
        default=None,
        description="with `etcd`: the file whose content is the user's password; it is read again when etcd asks anew",
    )
    etcd_ca: Annotated[OptionalPath, DefaultText("the system's CAs")] = Field(
        default=None, description="with `etcd`: file (PEM) with the trusted authorities"
    )
    etcd_cert: OptionalPath = Field(
        default=None, description="with `etcd`: file (PEM) with this node's certificate for etcd"
    )
    etcd_key: OptionalPath = Field(default=None, description="with `etcd`: file (PEM) with the key of that certificate")
    namespace: Annotated[Name, DefaultText("the pod's")] = Field(
        default="", description="with `kubernetes`: where the Leases are"
    )
    tls_ca: OptionalPath = Field(
        default=None,
        description="file (PEM) with the authority of the certificates with which nodes identify themselves to each "
        "other. Without certificates a node listens on loopback only, unless `insecure_peers` is true",
    )
    tls_cert: OptionalPath = Field(default=None, description="file (PEM) with this node's certificate for other nodes")
    tls_key: OptionalPath = Field(default=None, description="file (PEM) with the key of that certificate")
    insecure_peers: bool = Field(
        default=False,
        description="let other machines reach this node without certificates; only for a network in which you trust "
        "every machine",
    )
    secret_file: Annotated[OptionalPath, DefaultText("`~/.local/state/cachefs/cluster-secret`")] = Field(
        default=None,
        description="without certificates: a file of 16 to 64 bytes, mode 0600, that all nodes of the cluster share. "
        "The first daemon makes it.\n\n"
        "The default is one file for all daemons of a user, whatever their `state_dir` (`/dev/shm/cachefs-secret-UID` "
        "where the user has no home directory of their own, as in some containers); the daemon uses a file that exists "
        "in either place, and a running daemon makes a missing file again. Daemons of several users need one that all "
        "of them can read (mode 0640 and a group: the members of the group can act as nodes), and no other user. The "
        "file that you name may be a link, as in a mounted Kubernetes Secret (`defaultMode: 0400`)",
    )
    weight: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = Field(
        default=0.0,
        description="this node's part of the blocks, relative to that of others; 0: by the bytes that its tiers may "
        "take. With a static list, the list holds the weight",
    )
    replicas: Annotated[int, Field(ge=1, le=2)] = Field(
        default=1,
        description="most copies that the cluster keeps of a block: 1 or 2. With 2, hot datasets have second copies, "
        "in another `zone` if there are zones, so that the death of a node causes no read of the origin. A dataset is "
        "hot while published jobs read each of its blocks at least once in two hours. Set the same on all nodes.\n\n"
        "Second copies take the room that first copies leave, come from other nodes, and are evicted before first "
        "copies. For all of a dataset they need as much room as the dataset",
    )
    grace: Seconds = Field(
        default=30.0,
        description="seconds for which the blocks of a node that is away have their homes on that node.\n\n"
        "Other nodes keep its blocks as soon as it is away (no answer for 5 s, or its record is gone)",
    )
    window: Size = Field(
        default=0,
        description="bytes that this node may request from all peers together at once, through each of its network "
        "cards; 0: as many as suit the link, which is measured",
    )
    bandwidth: Size = Field(
        default=100 << 20,
        description="bytes in a second that a node may fetch in the background to rebalance, after it has joined or "
        "another node has left",
    )
    steal: bool = Field(
        default=True,
        description="a node that falls behind at an origin may give blocks to others that have time",
    )
    observers: Annotated[tuple[Observer, ...], Field(max_length=16)] = Field(
        default=(),
        description="names of clients that may ask what this node holds, such as a dashboard; with certificates, the "
        "names in them",
    )
    schedulers: Annotated[tuple[Observer, ...], Field(max_length=16)] = Field(
        default=(),
        description="names of clients that may ask as `observers` may, and may command warm-ups, pins, limits, "
        "evictions and drains: the `[cluster] name` of cachefs-scheduler.\n\n"
        "[What it does](scheduling.md)",
    )

    @property
    def own_name(self) -> str:
        """This node's name: `name`, else one made from the host name."""
        return self.name or re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname())[:63].strip(".-_") or "node"

    @property
    def static_nodes(self) -> tuple[StaticNode, ...]:
        """The nodes of the static list."""
        return tuple(map(parse_static_node, self.nodes))

    @property
    def listen_addresses(self) -> tuple[tuple[str, int], ...]:
        """Hosts and port of the data plane. The control endpoint has the next port of the first."""
        return tuple(map(split_address, self.listen))

    @property
    def advertised_hosts(self) -> tuple[str, ...]:
        """The hosts under which others reach this node: the first for all messages, the others for blocks only."""
        named = self.advertise
        return tuple(dict.fromkeys(named or [host for host, _ in self.listen_addresses]))

    @property
    def key_prefix(self) -> str:
        """The prefix of keys in etcd, without a slash at its end."""
        return self.prefix or f"/cachefs/{self.cluster}"

    @property
    def has_certificates(self) -> bool:
        """Whether nodes authenticate each other with certificates."""
        return self.tls_ca is not None

    @property
    def needs_secret(self) -> bool:
        """Whether nodes, which are then all on loopback, authenticate each other with a shared secret."""
        return self.enabled and not self.has_certificates and not self.insecure_peers

    def summary(self) -> str:
        return _summary(self)

    def remarks(self) -> Iterator[str]:
        return _remarks(self)

    def problems(self) -> Iterator[str]:
        return _problems(self)


def is_loopback(host: str) -> bool:
    """Return whether *host* is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _summary(section: ClusterSection) -> str:
    """Return the section's part of the summary line."""
    if not section.enabled:
        return ""
    shown = ", ".join(section.listen)
    return f", node {section.own_name} of cluster {section.cluster} ({section.membership}) on {shown}"


def _remarks(section: ClusterSection) -> Iterator[str]:
    """Yield a warning for each setting that is allowed but probably a mistake."""
    if not section.enabled:
        if section.observers or section.schedulers:
            yield (
                "cluster.observers, schedulers: no other machine can ask this node, since it is in no cluster and "
                "opens no port; a list of one makes it a cluster of its own: "
                'membership = "static", nodes = ["NAME=HOST:PORT"]'
            )
        if unused := sorted(section.model_fields_set - {"membership"}):
            yield f"cluster.{unused[0]}: has no effect, since cluster.membership is none"
        return
    elsewhere = any(not is_loopback(urlsplit(url).hostname or "") for url in section.etcd)
    if is_loopback(section.advertised_hosts[0]) and (elsewhere or section.membership == "kubernetes"):
        yield (
            f"cluster.listen = {section.listen[0]!r}: no other machine reaches this node there; set it to this "
            "machine's address, with a port"
        )
    if section.insecure_peers and not section.has_certificates:
        yield (
            "cluster.insecure_peers = true: any host that reaches this node over the network can read its cached data "
            "and what its jobs read; to prevent that, set cluster.tls_ca, tls_cert and tls_key"
        )
    if section.secret_file is not None and not section.needs_secret:
        yield "cluster.secret_file: has no effect with tls_ca, tls_cert and tls_key, or with insecure_peers"
    named = [section.listen_addresses[0][0], *(node.host for node in section.static_nodes)]
    if section.needs_secret and "localhost" in named:
        yield (
            'cluster: "localhost" may be two addresses, and another user may listen on one of them; write 127.0.0.1 or '
            "::1"
        )
    if section.etcd_user and any(url.startswith("http://") for url in section.etcd):
        yield "cluster.etcd_user: its password goes over the network in the clear, since cluster.etcd has http:// URLs"


def _problems(section: ClusterSection) -> Iterator[str]:
    """Yield an error for each contradiction between settings that are valid one by one."""
    if not section.enabled:
        return
    yield from _address_problems(section)
    yield from _certificate_problems(section)
    if section.membership == "static":
        yield from _list_problems(section)
    if section.membership == "etcd":
        yield from _etcd_problems(section)


def _address_problems(section: ClusterSection) -> Iterator[str]:
    hosts = [host for host, _ in section.listen_addresses]
    wild = next((host for host in hosts if host in ("0.0.0.0", "::")), "")
    if wild and not section.advertise and section.membership != "static":
        yield (
            f"cluster.listen = {section.listen[0]!r}: does not tell other nodes how to reach this node; set "
            'cluster.advertise to its address, or to "$VARIABLE" of the environment'
        )
    yield from _rail_problems(section, hosts, wild)
    if section.has_certificates or section.insecure_peers:
        return
    remedy = (
        "set cluster.tls_ca, tls_cert and tls_key, or insecure_peers = true in a network where you trust every host"
    )
    if beyond := [text for text, host in zip(section.listen, hosts, strict=True) if not is_loopback(host)]:
        yield f"cluster.listen = {beyond[0]!r}: without certificates only loopback is safe; {remedy}"
    elif len(section.advertised_hosts) > 1:
        # All of them are one machine, and another user may listen on an address of loopback that this node names.
        yield f"cluster.listen: without certificates a node has one address; {remedy}"
    elif section.membership == "static":
        for node in section.static_nodes:
            if not is_loopback(node.host):
                yield (
                    f"cluster.nodes: {node.name} at {node.host} is another machine, which needs certificates; {remedy}"
                )
                return


def _rail_problems(section: ClusterSection, hosts: Sequence[str], wild: str) -> Iterator[str]:
    """Yield an error for each contradiction between the addresses of this node."""
    if len(ports := {port for _, port in section.listen_addresses}) > 1:
        shown = " and ".join(map(str, sorted(ports)))
        yield f"cluster.listen: has the ports {shown}; a node has one port, the same on all its addresses"
    if wild and len(hosts) > 1:
        yield f"cluster.listen: {wild} stands for all addresses of this machine; list it alone, or leave it out"
    for key, values in (("listen", section.listen), ("advertise", section.advertise)):
        if twice := [value for value, count in Counter(values).items() if count > 1]:
            yield f"cluster.{key}: lists {twice[0]} more than once"


def _certificate_problems(section: ClusterSection) -> Iterator[str]:
    files = {key: getattr(section, key) for key in ("tls_ca", "tls_cert", "tls_key")}
    if any(files.values()) and (missing := [key for key, path in files.items() if path is None]):
        yield f"cluster.{missing[0]}: is missing; cluster.tls_ca, tls_cert and tls_key belong together"
    for key, path in files.items():
        yield from _file_problems(f"cluster.{key}", path)


def _file_problems(key: str, path: Path | None) -> Iterator[str]:
    if path is None:
        return
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        yield f"{key} = {str(path)!r}: {error.strerror}"


def _list_problems(section: ClusterSection) -> Iterator[str]:
    listed, own = section.static_nodes, section.own_name
    if not listed:
        yield 'cluster.nodes: is empty; list all nodes, this one too, as NAME=HOST:PORT (membership = "static")'
        return
    for what, values in (
        ("name", [node.name for node in listed]),
        ("address", [f"{node.host}:{node.port}" for node in listed]),
    ):
        for value, count in Counter(values).items():
            if count > 1:
                yield f"cluster.nodes: {count} nodes have the {what} {value}; each needs its own"
    taken = {(node.host, node.port): node.name for node in listed}
    for node in listed:
        if other := taken.get((node.host, node.port + 1)):
            yield (
                f"cluster.nodes: {other} has port {node.port + 1} of {node.host}, which {node.name} needs too: "
                "each node takes its port and the next one"
            )
    mine = [node for node in listed if node.name == own]
    if not mine:
        yield f"cluster.nodes: this node, {own}, is not in the list; add it, or set cluster.name to its name there"
    elif mine[0].port != section.listen_addresses[0][1]:
        yield (
            f"cluster.listen = {section.listen[0]!r}: other nodes expect this node ({own}) at port {mine[0].port}, "
            "according to cluster.nodes"
        )


def _etcd_problems(section: ClusterSection) -> Iterator[str]:
    if not section.etcd:
        yield 'cluster.etcd: is empty; list the URLs of etcd, such as "https://10.0.0.2:2379" (membership = "etcd")'
    if len({url.partition(":")[0] for url in section.etcd}) > 1:
        yield "cluster.etcd: has http:// and https:// URLs; give all the same"
    if bool(section.etcd_user) != (section.etcd_password_file is not None):
        yield "cluster.etcd_user, etcd_password_file: one is missing; they belong together"
    if (section.etcd_cert is None) != (section.etcd_key is None):
        yield "cluster.etcd_cert, etcd_key: one is missing; they belong together"
    if section.etcd_ca is not None and any(url.startswith("http://") for url in section.etcd):
        yield "cluster.etcd_ca: has no effect with http:// URLs; write https:// in cluster.etcd"
    for key in ("etcd_password_file", "etcd_ca", "etcd_cert", "etcd_key"):
        yield from _file_problems(f"cluster.{key}", getattr(section, key))
