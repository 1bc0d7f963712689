"""The configuration of cachefs-scheduler: a TOML file, validated as a whole before the service starts.

All problems are reported at once, one line each, with the key, its value and what was expected. `SchedulerSection`, the
value types and `problem_lines` also serve the configuration of cachefs-slurm-hint.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from cachefs.errors import ConfigError
from cachefs.planning.scheduling.copies import ENOUGH_HELD
from cachefs.sizes import parse_size
from cachefs.socket_path import MAX_SOCKET_PATH

# Characters of a value in a message.
MAX_SHOWN: Final = 100
_HOST: Final = re.compile(r"[A-Za-z0-9._:%-]{1,253}")
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
DEFAULT_PATH: Final = Path("/etc/cachefs/cachefs-scheduler.toml")
# Port of a daemon's data plane; its control endpoint has the next port.
DAEMON_PORT: Final = 7380
_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


class SchedulerSection(BaseModel):
    """A table of the file. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _absolute_path(path: Path) -> Path:
    if not path.is_absolute() or "\0" in str(path):
        raise ValueError("expected an absolute path")
    return Path(os.path.normpath(path))


AbsolutePath = Annotated[Path, AfterValidator(_absolute_path)]
# An empty text means None.
OptionalPath = Annotated[AbsolutePath | None, BeforeValidator(lambda value: None if value == "" else value)]
Seconds = Annotated[float, Field(gt=0, le=400 * 86400, allow_inf_nan=False)]


def problem_lines(model: type[BaseModel], error: ValidationError) -> list[str]:
    """Return all problems of a file, each as a line with the key, its value and what was expected."""
    return [_problem_line(model, one) for one in error.errors()]


def _problem_line(model: type[BaseModel], error: Mapping[str, Any]) -> str:
    place = [str(part) for part in error["loc"]]
    key = ".".join(place)
    if error["type"] == "extra_forbidden":
        known = _keys_at(model, place[:-1])
        close = difflib.get_close_matches(place[-1], known, 1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
        return f"{key}: is unknown; {hint}"
    message = str(error["msg"]).removeprefix("Value error, ")
    message = f"{message[0].lower()}{message[1:]}"
    # For a problem between the keys of a table, the input is the whole table.
    if isinstance(error["input"], Mapping):
        return f"{key}: {message}" if key else message
    return f"{key} = {str(error['input'])[:MAX_SHOWN]!r}: {message}"


def _keys_at(model: type[BaseModel], place: Sequence[str]) -> list[str]:
    """Return the keys of the table at *place*. Names of named tables, such as [datasets.NAME], are skipped."""
    for part in place:
        field = model.model_fields.get(part)
        model = next(_tables(field.annotation), model) if field is not None else model
    return sorted(model.model_fields)


def _tables(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _tables(part)


def split_listen_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [HOST]:PORT. Raises ValueError with the expected form."""
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    clear = bare == host or ":" in bare
    if not (_HOST.fullmatch(bare) and clear and (":" not in bare or bare != host) and port.isdecimal()):
        raise ValueError('expected HOST:PORT, such as "0.0.0.0:8443" or "[::]:8443"')
    if int(port[:6]) >= 1 << 16:
        raise ValueError("expected a port up to 65535")
    return bare, int(port)


def _listen_address(value: str) -> str:
    split_listen_address(value)
    return value


def _object_name(value: str) -> str:
    if value and not _NAME.fullmatch(value):
        raise ValueError("expected a name as Kubernetes has them: small letters, digits, dots and dashes")
    return value


ObjectName = Annotated[str, AfterValidator(_object_name)]


class KubeSection(SchedulerSection):
    """[kube]: the Kubernetes integration; absent if the file has no such table."""

    listen: Annotated[str, AfterValidator(_listen_address)] = Field(
        default="0.0.0.0:8443",
        description="HOST:PORT where kube-scheduler and the API server's webhooks ask, and Prometheus (`/metrics`) and "
        "probes (`/healthz`)",
    )
    tls_cert: OptionalPath = Field(
        default=None,
        description="file (PEM) with the service's certificate; a new file is used without a restart. Without it the "
        "service answers without encryption",
    )
    tls_key: OptionalPath = Field(
        default=None,
        description="file (PEM) with the key of that certificate; a new file is used without a restart",
    )
    client_ca: OptionalPath = Field(
        default=None,
        description="file (PEM) with authorities; if set, the service answers only clients with a certificate of one "
        "of them",
    )
    most_body: Annotated[int, Field(ge=1 << 20, le=1 << 30)] = Field(
        default=64 << 20,
        description="bytes of a request. With `nodeCacheCapable: false` a node has 1 to 15 KB",
    )
    api: Literal["pod", "off"] | AbsolutePath = Field(
        default="off",
        description="the API server: `pod` (that of the service's own pod), the path of a kubeconfig file, or `off`. "
        "With `off` the service answers kube-scheduler, but opens no gates: use no webhook then",
    )
    namespace: ObjectName = Field(
        default="",
        description="namespace of the Lease by which replicas agree which of them opens gates; without it that of the "
        "pod, or of the kubeconfig file",
    )
    lease: Annotated[ObjectName, Field(min_length=1)] = Field(
        default="cachefs-scheduler", description="name of this Lease"
    )
    selector: Annotated[str, Field(max_length=1000)] = Field(
        default="",
        description="a label selector of the pods that the service follows; without it the service follows all, and "
        "drops those without the annotation",
    )

    @model_validator(mode="after")
    def _certificate_and_key(self) -> "KubeSection":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both or neither")
        if self.client_ca is not None and self.tls_cert is None:
            raise ValueError("client_ca needs tls_cert and tls_key")
        return self


class InvalidSchedulerConfig(ConfigError):
    """Lists all problems of a configuration."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems  # one line each


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [HOST]:PORT. Raises ValueError with the expected form."""
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[2]) < 1 << 16:
        raise ValueError('expected HOST:PORT, such as "10.0.0.5:7380" or "[fd00::5]:7380"')
    return found[1].strip("[]"), int(found[2])


def _address(text: str) -> str:
    split_address(text)
    return text


Address = Annotated[str, AfterValidator(_address)]
# An empty text means None.
OptionalAddress = Annotated[Address | None, BeforeValidator(lambda value: None if value == "" else value)]
Rate = Annotated[int, BeforeValidator(parse_size)]
Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[!-~]+$")]


class ServiceSection(SchedulerSection):
    """[service]: the service itself and its endpoints."""

    socket: AbsolutePath = Field(
        default=Path("/run/cachefs-scheduler/cachefs-scheduler.sock"),
        description="unix socket where `cachectl sched` and hint commands ask; for the service's user",
    )
    socket_group: str = Field(default="", description="a group whose members may ask too")
    listen: OptionalAddress = Field(
        default=None,
        description="HOST:PORT for the same over TCP, such as `0.0.0.0:7390`. Anything but loopback needs certificates."
        "\n\n"
        "On loopback without certificates **every user of that machine** may do everything that `cachectl sched` and "
        "`cachectl scale` do, such as draining nodes and dropping copies; the log says so at the start",
    )
    tls_ca: OptionalPath = Field(
        default=None,
        description="file (PEM) with the trusted authority of clients. New files of it, `tls_cert` and `tls_key` are "
        "used without a restart",
    )
    tls_cert: OptionalPath = Field(default=None, description="file (PEM) with the service's certificate")
    tls_key: OptionalPath = Field(default=None, description="file (PEM) with the key of that certificate")
    insecure: bool = Field(default=False, description="TCP without certificates on other addresses than loopback")
    state_dir: AbsolutePath = Field(default=Path("/var/lib/cachefs-scheduler"), description="the queue, over a restart")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="`debug`, `info`, `warning` or `error`"
    )


class ObservedClusterSection(SchedulerSection):
    """[cluster]: the daemons that the service queries."""

    nodes: Annotated[tuple[Address, ...], Field(max_length=64)] = Field(
        default=(),
        description="one daemon or some to begin with, as their `cluster.listen`; all others are learnt from these. "
        "Every configuration needs this key",
        examples=[("127.0.0.1:7380",)],
    )
    name: Name = Field(
        default="cachefs-scheduler",
        description="the name of the service, as the daemons have it in `cluster.schedulers`",
    )
    tls_ca: OptionalPath = Field(
        default=None,
        description="file (PEM) with the nodes' authority. New files of it, `tls_cert` and `tls_key` are used without "
        "a restart",
    )
    tls_cert: OptionalPath = Field(default=None, description="file (PEM) with a certificate that names `name`")
    tls_key: OptionalPath = Field(default=None, description="file (PEM) with the key of that certificate")
    orders: bool = Field(
        default=True, description="false: the service only observes daemons, and sends them no commands"
    )


class LinksSection(SchedulerSection):
    """[links]: bandwidths of the network, in bytes in a second."""

    origin: Rate = Field(
        default=0,
        description="bytes in a second that all nodes together get from origins; 0: unknown",
    )
    zone: Rate = Field(default=0, description="bytes in a second that a zone gets from other zones; 0: unknown")
    region: Rate = Field(default=0, description="bytes in a second that a region gets from other regions; 0: unknown")
    node: Rate = Field(
        default=0,
        description="bytes in a second of one node's link; 0: the most that came to a node of its zone of late",
    )
    node_origin: Rate = Field(
        default=0,
        description="bytes in a second that one node gets from origins; 0: the most that came to a node of its zone of "
        "late",
    )


Cleanup = Literal["none", "ttl", "lru", "pin"]


class DatasetSection(SchedulerSection):
    """[defaults]: limits of jobs on a dataset, and the clean-up of its copies. [datasets.NAME] has the same keys."""

    max_jobs_per_copy: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=0,
        description="jobs that may read one copy at once; 0: any number. A job may name another number",
    )
    max_copies: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=4, description="copies that policy `clone` makes at most"
    )
    cleanup: Cleanup = Field(default="none", description="of copies that no job reads: `none`, `ttl`, `lru`, `pin`")
    ttl: Seconds = Field(default=7 * 86400.0, description="seconds since the last read on any node, for cleanup `ttl`")
    preload: bool = Field(default=True, description="fetch a job's data as soon as it is placed")
    release: bool = Field(
        default=True,
        description="let nodes that a job has left give up its data once other nodes have them",
    )


class QueueSection(SchedulerSection):
    """[queue]: waiting jobs."""

    forgotten: Seconds = Field(
        default=900.0,
        description="seconds without a message from its scheduler after which a waiting job loses its place; a running "
        "job after ten times as long",
    )
    most_jobs: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=10_000, description="jobs that are known at once; any further job may start"
    )
    copy_from: Annotated[float, Field(gt=0, le=1)] = Field(
        default=ENOUGH_HELD, description="the part of a dataset from which on it counts as a copy"
    )


class SchedulerConfig(SchedulerSection):
    """The whole configuration. docs/site/generated.py makes cachefs-scheduler.toml and the tables of
    docs/configuration.md from it: see `cachefs_daemon.section`."""

    service: ServiceSection = ServiceSection()
    cluster: ObservedClusterSection = ObservedClusterSection()
    names: dict[Name, Name] = Field(
        default_factory=dict,
        description="the scheduler's name of a node = the name that cachefs has for it, where these differ",
        examples=[{"gpu-17.example.org": "gpu17"}],
    )
    regions: dict[str, str] = Field(default_factory=dict, description="zone = region", examples=[{"rack1": "hall1"}])
    links: LinksSection = LinksSection()
    queue: QueueSection = QueueSection()
    defaults: DatasetSection = DatasetSection()
    datasets: Annotated[dict[str, DatasetSection], Field(max_length=10_000)] = Field(
        default_factory=dict,
        title="datasets.NAME",
        description="as `[defaults]`, for one dataset. `cachectl sched policy` overrides it",
        examples=[{"max_jobs_per_copy": 2, "cleanup": "lru"}],
    )
    kube: KubeSection | None = Field(default=None, description="Kubernetes: see [below](#kube-of-cachefs-scheduler)")

    def dataset_section(self, name: str) -> DatasetSection:
        """Return the section that applies to a dataset."""
        return self.datasets.get(name, self.defaults)

    @property
    def is_open_to_local_users(self) -> bool:
        """Return whether every user of this machine has the whole API, because it listens on loopback without
        certificates."""
        service = self.service
        is_plain = service.listen is not None and service.tls_ca is None
        return is_plain and split_address(service.listen or "")[0] in ("127.0.0.1", "::1", "localhost")

    def summary(self) -> str:
        """Describe the configuration in one line, for logs."""
        count = len(self.cluster.nodes)
        parts = [f"{count} {'daemon' if count == 1 else 'daemons'} to begin with", f"asked at {self.service.socket}"]
        parts += [f"and {self.service.listen}"] if self.service.listen else []
        parts += ["Kubernetes"] if self.kube is not None else []
        return ", ".join(parts)


def load(path: Path | None) -> SchedulerConfig:
    """Load a configuration file; None: the default path. Raises InvalidSchedulerConfig."""
    if path is None and not DEFAULT_PATH.exists():
        raise InvalidSchedulerConfig([f"{DEFAULT_PATH} does not exist; name another file with --config"])
    path = path or DEFAULT_PATH
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidSchedulerConfig([f"{path}: {error.strerror}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSchedulerConfig([f"{path}: {error}"]) from None
    try:
        config = SchedulerConfig.model_validate(raw)
    except ValidationError as error:
        raise InvalidSchedulerConfig([f"{path}: {one}" for one in problem_lines(SchedulerConfig, error)]) from None
    if found := list(_conflicts(config)):
        raise InvalidSchedulerConfig([f"{path}: {problem}" for problem in found])
    return config


def _conflicts(config: SchedulerConfig) -> Iterator[str]:
    """Yield conflicts between settings that are valid one by one."""
    if not config.cluster.nodes:
        yield (
            'cluster.nodes: is empty; name one daemon or some, as "HOST:PORT" with the port of its cluster.listen, '
            f'such as "10.0.0.5:{DAEMON_PORT}"; the others are learnt from these'
        )
    for prefix, section in (("service", config.service), ("cluster", config.cluster)):
        files = {key: getattr(section, key) for key in ("tls_ca", "tls_cert", "tls_key")}
        if any(files.values()) and (missing := [key for key, file in files.items() if file is None]):
            yield f"{prefix}.{missing[0]}: is missing; {prefix}.tls_ca, tls_cert and tls_key belong together"
        for key, file in files.items():
            if file is not None and not file.is_file():
                yield f"{prefix}.{key} = {str(file)!r}: there is no such file"
    service = config.service
    if service.listen and service.tls_ca is None and not service.insecure and not config.is_open_to_local_users:
        yield (
            f"service.listen = {service.listen!r}: without certificates only loopback is safe; set service.tls_ca, "
            "tls_cert and tls_key, or insecure = true if you trust every user of that network"
        )
    if len(bytes(service.socket)) > MAX_SOCKET_PATH:
        yield f"service.socket = {str(service.socket)!r}: paths of sockets have at most {MAX_SOCKET_PATH} bytes"
    for name, count in _duplicate_names(config.names.values()):
        yield f"names: {count} names of the scheduler stand for the node {name}; each node has one"


def _duplicate_names(names: Any) -> Iterator[tuple[str, int]]:
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
    return ((name, count) for name, count in sorted(seen.items()) if count > 1)
