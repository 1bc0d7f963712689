"""The parts of a bundle: each has a name, and a function that gathers it with a deadline and a limit."""

import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cachefs import __version__
from cachefs.cgroup import memory_limits
from cachefs.errors import CachefsError
from cachefs.extras import DISTRIBUTION
from cachefs.job_messages import JobName
from cachefs.messages import DatasetList, Empty, Status
from cachefs.mount_table import file_system_kinds, mount_points
from cachefs.rpc import CLUSTER, DATASET_LIST, JOB_LIST, STALL_LIST, STATUS, WARMUP_LIST, DaemonClient
from cachefs_tools.cachectl.command_session import to_json_types
from cachefs_tools.debug_bundle import redaction
from cachefs_tools.doctor.examination import Examination, ExaminationRequest

CALL_SECONDS: Final = 20.0
JOURNAL_SECONDS: Final = 20.0
JOURNAL_LINES: Final = 3000
# Seconds between two readings of the counters, for rates.
STATUS_INTERVAL: Final = 2.0
# Bytes of the end of a log.
LOG_BYTES: Final = 1 << 20
_MAX_THREADS: Final = 512
_PACKAGES: Final = (
    "aiobotocore", "aiohttp", "botocore", "click", "grpcio", "lmdb", "msgspec", "numpy", "psutil", "pydantic",
    "pyfuse3", "rich", "torch", "trio", "xxhash",
)  # fmt: skip


class PartUnavailable(Exception):
    """A part is not available, for the reason in the text."""


@dataclass(frozen=True, slots=True)
class BundlePart:
    """A file of the bundle."""

    name: str
    # A description for people.
    title: str
    gather: Callable[[], Any]  # returns a JSON document or a text; raises PartUnavailable


@dataclass(slots=True)
class BundleNode:
    """The node of the bundle."""

    socket: Path
    config: Path
    logs: Sequence[Path] = ()
    unit: str = "cachefsd"
    # Learnt while gathering.
    status: Status | None = None
    datasets: DatasetList | None = None
    _client: DaemonClient | None = field(default=None, repr=False)

    def parts(self) -> list[BundlePart]:
        """Return all parts, in the order of gathering."""
        calls = [
            BundlePart("status.json", "the daemon's status, with mounts and errors", self._status),
            BundlePart("datasets.json", "datasets", self._datasets),
            BundlePart("jobs.json", "jobs, with their consumers", lambda: self._call(JOB_LIST, Empty())),
            BundlePart("stalls.json", "reads that waited", lambda: self._call(STALL_LIST, JobName(job=""))),
            BundlePart("warmups.json", "warmups", lambda: self._call(WARMUP_LIST, Empty())),
            BundlePart("cluster.json", "the cluster", lambda: self._call(CLUSTER, Empty())),
            BundlePart("status-later.json", f"the status {STATUS_INTERVAL:.0f} s later, for rates", self._status_later),
        ]
        logs = [BundlePart(f"log-{number}.txt", f"the end of {path}", functools.partial(read_tail, path, LOG_BYTES))
                for number, path in enumerate(self.logs, 1)]  # fmt: skip
        return [
            BundlePart("doctor.json", "findings of cachectl doctor", self._doctor),
            *calls,
            BundlePart("config.json", "the configuration, keys that cachefs knows", self._config),
            BundlePart("versions.json", "versions of cachefs, Python, kernel and packages", versions),
            BundlePart("machine.json", "memory, processors, limits", machine),
            BundlePart("mounts.json", "the table of mounts: kinds, and those of cachefs", mounts),
            BundlePart("environment.json", "names of the daemon's variables", self._environment),
            BundlePart("processes.json", "threads of daemon and mounts, and where each waits", self._processes),
            BundlePart("journal.txt", f"the last {JOURNAL_LINES:,} lines of the unit {self.unit}", self._journal),
            *logs,
        ]

    def harmless_ids(self) -> Iterator[str]:
        """Yield long ids that are not secret."""
        if self.status is not None:
            yield self.status.instance
            yield from (mount.id for mount in self.status.mounts)
        if self.datasets is not None:
            for dataset in self.datasets.datasets:
                yield from (dataset.snapshot, *dataset.others)

    def known_secrets(self) -> Iterator[str]:
        """Yield known secrets: of the daemon, of this user, and in files named by the configuration."""
        daemon = redaction.environment_of(self.status.pid) if self.status is not None else {}
        for variables in (dict(os.environ), daemon):
            yield from redaction.variable_secrets(variables)
            yield from redaction.file_secrets(variables)
        for path in _secret_files(_config_document(self.config)):
            yield from redaction.secret_file_content(path)
        for dataset in self.datasets.datasets if self.datasets is not None else ():
            yield from redaction.url_secrets(dataset.url)

    def _call(self, method: Any, request: Any) -> Any:
        if self.status is None and method is not STATUS:
            raise PartUnavailable("the daemon does not answer")
        try:
            if self._client is None:
                self._client = DaemonClient(self.socket)
            return self._client.call(method, request, CALL_SECONDS)
        except CachefsError as error:
            raise PartUnavailable(str(error)) from None

    def _status(self) -> Any:
        self.status = self._call(STATUS, Empty())
        return self.status

    def _datasets(self) -> Any:
        self.datasets = self._call(DATASET_LIST, Empty())
        return self.datasets

    def _status_later(self) -> Any:
        if self.status is not None:
            time.sleep(STATUS_INTERVAL)
        return self._call(STATUS, Empty())

    def _doctor(self) -> Any:
        config = self.config if self.config.exists() else None
        return {"findings": Examination(ExaminationRequest(self.socket, config), lambda _: None).run()}

    def _config(self) -> Any:
        if not self.config.exists():
            return {"note": f"there is no {self.config}: defaults hold, unless the daemon was started with --config"}
        document = _config_document(self.config)
        if document is None:
            raise PartUnavailable(f"{self.config} cannot be read, or is not TOML; cachefsd --check-config tells more")
        return known_settings(document)

    def _environment(self) -> Any:
        if self.status is None:
            raise PartUnavailable("the daemon does not answer")
        found = redaction.environment_of(self.status.pid)
        if not found:
            raise PartUnavailable(f"this user may not see the environment of process {self.status.pid}")
        shown = {name: value for name, value in sorted(found.items()) if name in redaction.HARMLESS_VARIABLES}
        return {"shown": shown, "not shown": sorted(found.keys() - shown.keys())}

    def _processes(self) -> Any:
        if self.status is None:
            raise PartUnavailable("the daemon does not answer")
        pids = {"daemon": self.status.pid, **{f"mount {each.id}": each.pid for each in self.status.mounts[:32]}}
        return {name: thread_states(pid) for name, pid in pids.items()}

    def _journal(self) -> str:
        command = [
            "journalctl",
            "--unit",
            self.unit,
            "--lines",
            str(JOURNAL_LINES),
            "--no-pager",
            "--output",
            "short-iso",
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=JOURNAL_SECONDS, check=False, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PartUnavailable(f"journalctl: {error}") from None
        if done.returncode:
            raise PartUnavailable(f"journalctl: {done.stderr.decode(errors='replace').strip()[:200]}")
        if done.stdout.strip() == b"-- No entries --":
            raise PartUnavailable(f"the journal has no line of {self.unit}, or this user may not see any")
        return _last_lines(done.stdout, LOG_BYTES)


def gather_part(part: BundlePart) -> Any:
    """Return the contents of a part: a text, or a JSON document. Raises PartUnavailable."""
    try:
        return to_json_types(part.gather())
    except PartUnavailable:
        raise
    except Exception as error:  # other parts are needed even more if something is broken
        raise PartUnavailable(f"{type(error).__name__}: {error}") from None


def known_settings(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known keys of a configuration. Others may hold anything, so only their number is given."""
    from cachefs_cluster.config import ClusterConfig as Config

    result: dict[str, Any] = {}
    others = 0
    for name, values in document.items():
        section = Config.model_fields.get(name)
        if section is None or not isinstance(values, dict):
            others += 1
            continue
        known = set(getattr(type(getattr(Config(), name)), "model_fields", {})) or _ssd_keys()
        result[name] = {key: value for key, value in values.items() if key in known}
        others += len(values) - len(result[name])
    return {**result, "(keys that are not known, left out)": others}


def _ssd_keys() -> set[str]:
    from cachefs_daemon.sections import SsdSection

    return set(SsdSection.model_fields)


def _config_document(path: Path) -> dict[str, Any] | None:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _secret_files(config: Mapping[str, Any] | None) -> Iterator[Path]:
    """Yield files named by the configuration that hold one secret each."""
    for section in (config or {}).values():
        for key, value in section.items() if isinstance(section, dict) else ():
            if isinstance(value, str) and key.endswith(("_password_file", "_token_file")):
                yield Path(value)


def versions() -> dict[str, Any]:
    packages: dict[str, str | None] = {}
    for name in (DISTRIBUTION, *_PACKAGES):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    try:
        system = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        system = ""
    return {"cachefs": __version__, "python": sys.version, "kernel": os.uname().release, "machine": os.uname().machine,
            "system": system, "packages": packages}  # fmt: skip


def machine() -> dict[str, Any]:
    memory = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        memory[name] = value.strip()
    return {"processors": len(os.sched_getaffinity(0)), "load": os.getloadavg(), "memory": memory,
            "memory_cgroups": [{"limit": limit, "held": used} for limit, used in memory_limits()],
            "pressure": {name: _text(Path("/proc/pressure") / name) for name in ("cpu", "io", "memory")},
            "limits": _text(Path("/proc/self/limits"))}  # fmt: skip


def mounts() -> dict[str, Any]:
    """Return cachefs mounts; for other file systems only the kinds, since their options may hold passwords."""
    ours = [{"path": str(each.path), "spec": each.spec, "device": each.device, "shielded": each.shielded_connection}
            for each in mount_points()]  # fmt: skip
    return {"cachefs": ours, "kinds": file_system_kinds()}


def thread_states(process: int) -> list[dict[str, str]]:
    """Return the kernel's view of each thread of a process. Stacks are visible to root only."""
    found = []
    tasks = sorted(Path(f"/proc/{process}/task").glob("*"))[:_MAX_THREADS]
    for task in tasks:
        state = _text(task / "stat").rpartition(")")[2].split()
        found.append({"thread": task.name, "name": _text(task / "comm").strip(), "state": state[0] if state else "",
                      "waits_in": _text(task / "wchan"), "stack": _text(task / "stack")})  # fmt: skip
    return found


def read_tail(path: Path, most: int) -> str:
    """Return the last *most* bytes of a file. Raises PartUnavailable."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most - 1))
            return _last_lines(file.read(most + 1), most)
    except OSError as error:
        raise PartUnavailable(f"{path}: {error.strerror}") from None


def _last_lines(content: bytes, most: int) -> str:
    """Return at most the last *most* bytes, in whole lines: a truncated secret would not be recognised."""
    if len(content) > most:
        content = content[-most - 1 :].partition(b"\n")[2]
    return content.decode(errors="replace")


def part_text(content: Any) -> str:
    """Return the text of a part's file."""
    return content if isinstance(content, str) else json.dumps(content, indent=1, ensure_ascii=True) + "\n"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
