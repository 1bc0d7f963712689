"""The configuration of cachefs-scheduler: a TOML file, validated as a whole before the service starts.

All problems are reported at once, one line each, with the key, its value and what was expected.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from cachefs.errors import ConfigError
from cachefs.planning.scheduling.copies import ENOUGH_HELD
from cachefs.sizes import parse_size
from cachefs.socket_path import MAX_SOCKET_PATH
from cachefs_scheduler.kube_section import KubeSection
from cachefs_scheduler.section import AbsolutePath, OptionalPath, SchedulerSection, Seconds, problem_lines

DEFAULT_PATH: Final = Path("/etc/cachefs/cachefs-scheduler.toml")
# Port of a daemon's data plane; its control endpoint has the next port.
DAEMON_PORT: Final = 7380
_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


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

    socket: AbsolutePath = Path("/run/cachefs-scheduler/cachefs-scheduler.sock")
    socket_group: str = ""
    listen: OptionalAddress = None
    tls_ca: OptionalPath = None
    tls_cert: OptionalPath = None
    tls_key: OptionalPath = None
    insecure: bool = False
    state_dir: AbsolutePath = Path("/var/lib/cachefs-scheduler")
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class ObservedClusterSection(SchedulerSection):
    """[cluster]: the daemons that the service queries."""

    nodes: Annotated[tuple[Address, ...], Field(max_length=64)] = ()
    name: Name = "cachefs-scheduler"
    tls_ca: OptionalPath = None
    tls_cert: OptionalPath = None
    tls_key: OptionalPath = None
    orders: bool = True


class LinksSection(SchedulerSection):
    """[links]: network bandwidths in bytes per second; 0: unknown."""

    origin: Rate = 0
    zone: Rate = 0
    region: Rate = 0
    node: Rate = 0
    node_origin: Rate = 0


Cleanup = Literal["none", "ttl", "lru", "pin"]


class DatasetSection(SchedulerSection):
    """[datasets.NAME], and [defaults] for all others: limits of jobs on a dataset, and the clean-up of its copies."""

    max_jobs_per_copy: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    max_copies: Annotated[int, Field(ge=1, le=1024)] = 4
    cleanup: Cleanup = "none"
    ttl: Seconds = 7 * 86400.0
    preload: bool = True
    release: bool = True


class QueueSection(SchedulerSection):
    """[queue]: waiting jobs."""

    forgotten: Seconds = 900.0
    most_jobs: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    copy_from: Annotated[float, Field(gt=0, le=1)] = ENOUGH_HELD


class SchedulerConfig(SchedulerSection):
    """The whole configuration."""

    service: ServiceSection = ServiceSection()
    cluster: ObservedClusterSection = ObservedClusterSection()
    names: dict[Name, Name] = Field(default_factory=dict)
    regions: dict[str, str] = Field(default_factory=dict)
    links: LinksSection = LinksSection()
    defaults: DatasetSection = DatasetSection()
    datasets: Annotated[dict[str, DatasetSection], Field(max_length=10_000)] = Field(default_factory=dict)
    queue: QueueSection = QueueSection()
    kube: KubeSection | None = None

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
