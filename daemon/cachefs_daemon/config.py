"""The daemon's configuration: a TOML file, checked as a whole before any part starts.

All errors are reported together, one line each: the key, its value, and what was expected.
"""

import contextlib
import difflib
import grp
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import psutil
from pydantic import ValidationError

from cachefs.block import PIECE_SIZE
from cachefs.cgroup import memory_limits
from cachefs.errors import ConfigError
from cachefs.mount_table import file_system_kinds
from cachefs.sizes import format_size
from cachefs.socket_path import MAX_SOCKET_PATH
from cachefs_daemon.section import ClusterTable, LiveEffect, Section
from cachefs_daemon.sections import (
    AUTO,
    REMOVED_POLICIES,
    DaemonSection,
    MemorySection,
    MetricsSection,
    OriginSection,
    PrefetchSection,
    SecuritySection,
    SsdSection,
    WebSection,
)

DEFAULT_PATH: Final = Path("/etc/cachefs/cachefsd.toml")
MIN_BLOCK_SIZE: Final = PIECE_SIZE
MAX_BLOCK_SIZE: Final = 64 << 20
# Space for a record's header in front of its data, in a segment and in a budget.
RECORD_OVERHEAD: Final = 64 << 10
# Processors per fetch process, and the largest number of fetch processes that "auto" gives: see
# docs/decisions/0040-fetch-processes.md.
PROCESSORS_PER_PROCESS: Final = 8
MAX_AUTO: Final = 4
MIN_LISTING: Final = 1 << 20
# A budget of fewer blocks than FEW_BLOCKS is probably a mistake. SMALL_RESERVE: about what a small tier needs besides
# its blocks.
FEW_BLOCKS: Final = 8
SMALL_RESERVE: Final = 64 << 10
# Characters of a wrong value that a message shows.
MAX_SHOWN: Final = 100


class InvalidConfig(ConfigError):
    """Lists every error of a configuration."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems  # one line each


class Config(Section):
    """The whole file, of a node that is in no cluster. `cachefs_daemon.sections` describes each key."""

    daemon: DaemonSection = DaemonSection()
    memory: MemorySection = MemorySection()
    ssd: SsdSection | None = None
    origin: OriginSection = OriginSection()
    prefetch: PrefetchSection = PrefetchSection()
    security: SecuritySection = SecuritySection()
    cluster: ClusterTable = ClusterTable()
    metrics: MetricsSection = MetricsSection()
    web: WebSection = WebSection()

    @property
    def origin_timeouts(self) -> tuple[float, float]:
        """The connect and read timeouts in seconds. One that the file does not set is at most half of read_deadline,
        which leaves time for a second attempt."""
        half = self.daemon.read_deadline / 2
        given = self.origin.model_fields_set
        connect, read = self.origin.connect_timeout, self.origin.read_timeout
        return (
            connect if "connect_timeout" in given else min(connect, half),
            read if "read_timeout" in given else min(read, half),
        )

    @property
    def fetch_processes(self) -> int:
        """The number of fetch processes."""
        if self.prefetch.processes != AUTO:
            return self.prefetch.processes
        return min(MAX_AUTO, len(os.sched_getaffinity(0)) // PROCESSORS_PER_PROCESS)

    @property
    def memory_budget(self) -> int:
        """Bytes that the memory tier may take."""
        return self.memory.budget.resolve(psutil.virtual_memory().total)

    @property
    def memory_min_free(self) -> int:
        """Bytes of the memory tier's file system, and of the machine's memory, that stay free."""
        return self.memory.min_free.resolve(_disk_size(self.memory.dir))

    @property
    def ssd_budget(self) -> int:
        """Bytes that the SSD tier may take; 0 where there is none."""
        return self.ssd.budget.resolve(_disk_size(self.ssd.dir)) if self.ssd is not None else 0

    @property
    def ssd_min_free(self) -> int:
        """Bytes of the SSD tier's file system that stay free."""
        return self.ssd.min_free.resolve(_disk_size(self.ssd.dir)) if self.ssd is not None else 0

    @property
    def plan_memory(self) -> int:
        """Bytes that the plans of all jobs may take: a quarter of the memory that the daemon may use."""
        limits = (limit for limit, _ in memory_limits())
        return min([int(psutil.virtual_memory().total), *limits]) // 4

    def remarks(self) -> Iterator[str]:
        """Yield a warning for each setting that is allowed but probably a mistake, or goes with the next release."""
        if self.daemon.policy in REMOVED_POLICIES:
            yield (
                f"daemon.policy = {self.daemon.policy!r}: this policy is gone, and {self.daemon.eviction_policy} is "
                f'used in its place; set policy = "{self.daemon.eviction_policy}", since the next release refuses '
                "the old name"
            )
        memory = min([int(psutil.virtual_memory().total), *(limit for limit, _ in memory_limits())])
        rooms = [("memory", self.memory_budget, memory, "memory that the daemon may use")]
        if self.ssd is not None:
            rooms.append(("ssd", self.ssd_budget, _disk_size(self.ssd.dir), f"file system of {self.ssd.dir}"))
        record = self.daemon.block_size + RECORD_OVERHEAD
        for name, budget, room, what in rooms:
            if 0 < budget < FEW_BLOCKS * record:
                count = max(0, budget - SMALL_RESERVE) // record
                blocks = f"{count or 'no'} {'block' if count == 1 else 'blocks'}"
                yield (
                    f"{name}.budget = {format_size(budget)}: holds {blocks} of {format_size(self.daemon.block_size)}, "
                    f"so most blocks of larger files bypass it; give it at least {format_size(FEW_BLOCKS * record)}"
                )
            if budget > room:
                yield (
                    f"{name}.budget = {format_size(budget)}: more than the {what} has ({format_size(room)}); "
                    "lower it, since the tier cannot have more than there is"
                )
        if self.ssd is not None:
            room = _disk_size(self.ssd.dir)
            if self.ssd_budget <= room < self.ssd_budget + self.ssd_min_free:
                yield (
                    f"ssd.budget = {format_size(self.ssd_budget)}: of {format_size(room)}, min_free leaves "
                    f"{format_size(room - self.ssd_min_free)}; the tier uses no more than that"
                )
        if not self.prefetch.enabled and self.prefetch.processes > 0:
            given = self.prefetch.processes
            yield f"prefetch.processes = {given}: no fetch processes run, since prefetch.enabled is false"
        yield from self.cluster.remarks()

    def summary(self) -> str:
        """Return the configuration in one line."""
        ssd = f"{format_size(self.ssd_budget)} in {self.ssd.dir}" if self.ssd and self.ssd_budget else "none"
        return (
            f"policy {self.daemon.eviction_policy}, blocks of {format_size(self.daemon.block_size)}, "
            f"memory tier {format_size(self.memory_budget)} in {self.memory.dir}, ssd tier {ssd}, "
            f"socket {self.daemon.socket}{self.cluster.summary()}"
        )


# Largest file that is read: a device, or a file of data, may have no end.
_MAX_BYTES: Final = 4 << 20


# Returns the model of a configuration with the tables of all packages.
FullModel = Callable[[], type["Config"]]


def load(path: Path | None, full_model: FullModel = lambda: Config) -> Config:
    """Load the configuration from *path* (None: the system's file where there is one, else the defaults). full_model:
    see `parse`. Raises InvalidConfig with every error found."""
    if path is None and not DEFAULT_PATH.exists():
        return parse({}, full_model)
    path = path or DEFAULT_PATH
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise InvalidConfig([f"is larger than {format_size(_MAX_BYTES)}; is it a configuration?"])
        return parse(tomllib.loads(text.decode()), full_model)
    except OSError as error:
        raise InvalidConfig([f"{path}: cannot be read: {error.strerror}"]) from None
    except RecursionError:
        raise InvalidConfig([f"{path}: is not valid TOML: too many brackets within each other"]) from None
    except ValueError as error:  # not TOML, not UTF-8, not a path, or a number of 5,000 digits
        raise InvalidConfig([f"{path!s}: is not valid TOML: {error}"]) from None
    except InvalidConfig as error:
        raise InvalidConfig([f"{path}: {problem}" for problem in error.problems]) from None


def parse(values: Mapping[str, Any], full_model: FullModel = lambda: Config) -> Config:
    """Validate *values*. full_model: called where they are more than a node in no cluster has, or wrong. Raises
    InvalidConfig with every error found."""
    try:
        return _validate(values, Config)
    except InvalidConfig:
        return _validate(values, full_model())


def _validate(values: Mapping[str, Any], model: type[Config]) -> Config:
    """Validate *values* by a model. Raises InvalidConfig with every error found."""
    wrong: list[str] = []
    left_out: list[tuple[int | str, ...]] = []
    try:
        config = model.model_validate(values)
    except ValidationError as error:
        wrong = [_explain(detail, sections_of(model)) for detail in error.errors()]
        try:
            left_out = [detail["loc"] for detail in error.errors()]
            config = model.model_validate(_without(values, left_out))
        except ValidationError:
            raise InvalidConfig(wrong) from None
    found = list(_contradictions(config))
    if wrong and "cluster" in {str(location[0]) for location in left_out}:
        # these errors may be about the settings that were left out
        found = [one for one in found if not one.startswith("cluster.")]
    problems = [*wrong, *found]
    if problems:
        raise InvalidConfig(problems)
    return config


def _without(values: Mapping[str, Any], locations: Sequence[tuple[int | str, ...]]) -> dict[str, Any]:
    """Return *values* without those at *locations*, so that errors in the other values are found too."""
    left = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    for section, *keys in locations:
        if keys and isinstance(left.get(str(section)), dict):
            left[str(section)].pop(keys[0], None)
        else:
            left.pop(str(section), None)
    return left


def _explain(detail: Any, sections: Mapping[str, type[Section]]) -> str:
    """Return one line for an error of pydantic."""
    location = [str(part) for part in detail["loc"]]
    key = ".".join(location)
    if key in _REMOVED_KEYS:
        return f"{key}: {_REMOVED_KEYS[key]}"
    if detail["type"] == "extra_forbidden":
        return f"{key}: unknown key; {_suggest_key(location, sections)}"
    if detail["type"] == "model_type":
        return f"{key} = {_display_value(detail['input'])}: expected a table, [{key}]"
    if detail["type"] == "tuple_type":
        return f'{key} = {_display_value(detail["input"])}: expected a list, such as ["…"]'
    message = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else detail["msg"]
    return f"{key} = {_display_value(detail['input'])}: {message.replace('Input should be', 'expected')}"


def _display_value(value: object) -> str:
    """Return *value* as a message shows it."""
    try:
        text = repr(value)
    except ValueError:  # a number of 5,000 digits
        return "a number of very many digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _suggest_key(location: list[str], sections: Mapping[str, type[Section]]) -> str:
    *section, name = location
    known = list(sections[section[0]].model_fields) if section else list(sections)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    homes = [other for other, table in sections.items() if name in table.model_fields]
    if homes:
        return f"`{name}` belongs in [{homes[0]}]"
    return f"known here: {', '.join(known)}"


def sections_of(model: type[Config]) -> dict[str, type[Section]]:
    """Return the tables of a configuration, by name."""
    found: dict[str, type[Section]] = {}
    for name, field in model.model_fields.items():
        kinds = get_args(field.annotation) or (field.annotation,)  # a table that may be missing is a union with None
        found[name] = next(one for one in kinds if isinstance(one, type) and issubclass(one, Section))
    return found


def live_effects(model: type[Config]) -> dict[str, LiveEffect]:
    """Return the settings that take effect at a reload, such as "memory.budget", with their effects."""
    return {
        f"{name}.{key}": mark
        for name, section in sections_of(model).items()
        for key, field in section.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, LiveEffect)
    }


# Keys of earlier releases, with the message for a file that still has them.
_REMOVED_KEYS: Final = {
    "origin.attempts": "is no longer used: a read is tried until daemon.read_deadline; remove the line",
}


def _contradictions(config: Config) -> Iterator[str]:
    """Yield an error for each contradiction between settings that are valid one by one."""
    impossible = list(_impossible_directories(config)) or list(_unusable_directories(config))
    yield from impossible
    daemon = config.daemon
    block = daemon.block_size
    if block % PIECE_SIZE or not MIN_BLOCK_SIZE <= block <= MAX_BLOCK_SIZE:
        yield (
            f"daemon.block_size = {format_size(block)}: expected a multiple of {format_size(PIECE_SIZE)} "
            f"from {format_size(MIN_BLOCK_SIZE)} to {format_size(MAX_BLOCK_SIZE)}"
        )
    if not impossible:  # the size limits of the tiers depend on their directories
        yield from _tier_problems("memory", config.memory, config.memory_budget, block)
    if not impossible and config.ssd is not None and config.ssd_budget > 0:
        yield from _tier_problems("ssd", config.ssd, config.ssd_budget, block)
        yield from _overlaps(config.memory.dir, config.ssd.dir)
    if config.origin.max_bytes_in_flight < block:
        yield (
            f"origin.max_bytes_in_flight = {format_size(config.origin.max_bytes_in_flight)}: "
            f"expected at least daemon.block_size ({format_size(block)})"
        )
    if config.origin.max_listing < MIN_LISTING:
        yield (
            f"origin.max_listing = {format_size(config.origin.max_listing)}: "
            f"expected at least {format_size(MIN_LISTING)}; every larger index would be refused"
        )
    for name, seconds in zip(("connect_timeout", "read_timeout"), config.origin_timeouts, strict=True):
        if seconds > daemon.read_deadline:
            yield (
                f"origin.{name} = {seconds:g}: longer than daemon.read_deadline ({daemon.read_deadline:g}), so a "
                "request to a silent server would never be repeated; lower it or leave it out"
            )
    if len(os.fsencode(daemon.socket)) > MAX_SOCKET_PATH:
        yield f"daemon.socket = {str(daemon.socket)!r}: longer than the {MAX_SOCKET_PATH} bytes that it may have"
    for key, group in (
        ("daemon.socket_group", daemon.socket_group),
        ("security.admin_group", config.security.admin_group),
    ):
        if group and not _is_group(group):
            yield f"{key} = {group!r}: no such group on this machine"
    yield from config.cluster.problems()


def _is_group(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except (KeyError, ValueError):  # ValueError: the name contains NUL
        return False
    return True


def _impossible_directories(config: Config) -> Iterator[str]:
    """Yield an error for each directory that cannot be created."""
    ssd = {"ssd.dir": config.ssd.dir} if config.ssd is not None else {}
    directories = {"daemon.state_dir": config.daemon.state_dir, "memory.dir": config.memory.dir, **ssd}
    for key, directory in {"daemon.socket": config.daemon.socket.parent, **directories}.items():
        try:
            nearest = _nearest_existing(directory)
            # `cachefs_daemon.store.config_check` checks the directory itself.
            if nearest != directory and not nearest.is_dir():
                yield f"{key} = {_display_value(str(directory))}: {nearest} is not a directory"
        except OSError as error:
            yield f"{key} = {_display_value(str(directory))}: {error.strerror}"


def _unusable_directories(config: Config) -> Iterator[str]:
    """Yield an error for each tier on a file system that stores nothing, such as /proc."""
    better = {"memory.dir": "tmpfs, as /dev/shm is", **({"ssd.dir": "a disk"} if config.ssd is not None else {})}
    for key, kind in better.items():
        directory = config.memory.dir if key == "memory.dir" or config.ssd is None else config.ssd.dir
        if _disk_size(directory) == 0:
            nearest = _nearest_existing(directory)
            device = nearest.stat().st_dev
            name = file_system_kinds().get(f"{os.major(device)}:{os.minor(device)}", "a file system")
            yield (
                f"{key} = {_display_value(str(directory))}: it is on {name} (of {nearest}), where nothing can be "
                f"stored; choose a directory on {kind}"
            )


def _tier_problems(name: str, tier: MemorySection | SsdSection, budget: int, block: int) -> Iterator[str]:
    record = block + RECORD_OVERHEAD
    if budget < record:
        yield (
            f"{name}.budget = {format_size(budget)}: smaller than one block of {format_size(block)}; "
            f"give it at least {format_size(record)} or lower daemon.block_size"
        )
    if tier.segment_size < record:
        yield (
            f"{name}.segment_size = {format_size(tier.segment_size)}: smaller than one block of {format_size(block)}; "
            f"give it at least {format_size(record)} or lower daemon.block_size"
        )


def _overlaps(memory: Path, ssd: Path) -> Iterator[str]:
    if memory.is_relative_to(ssd) or ssd.is_relative_to(memory):
        yield f"ssd.dir = {str(ssd)!r}: overlaps memory.dir ({memory}); give each tier a directory of its own"


def _disk_size(directory: Path) -> int:
    """Return the bytes of the file system that holds *directory*, or will hold it once it is created."""
    return shutil.disk_usage(_nearest_existing(directory)).total


def _nearest_existing(directory: Path) -> Path:
    """Return *directory*, or its nearest ancestor that exists. Raises OSError where that cannot be determined."""
    for path in (directory, *directory.parents):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
            return path
    return Path("/")
