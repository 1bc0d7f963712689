"""What the processes of one `cachefs run` leave for each other: a small file each, of which the summary is made.

`cachefs run` makes a directory, whose name its processes inherit. The helper of each training process writes there what
its loaders have done, again and again, and says when that is final. The process that prints the summary reads all of
it. Nothing here raises: what cannot be written or read is missing in the summary.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cachefs.publishing import clock
from cachefs.publishing.channel import SOCKET_NAME
from cachefs.publishing.channel import remove as remove_helper_directory

# Names the directory.
RUN_VARIABLE: Final = "CACHEFS_RUN"
# Where it is 1, neither what is understood of loaders nor the summary is said.
QUIET_VARIABLE: Final = "CACHEFS_QUIET"
# Names the first Python of the run: it prints the summary when it ends.
TOP_VARIABLE: Final = "CACHEFS_TOP"
_PREFIX: Final = "run-"
# A socket that was made so many seconds ago may still have no listener.
_NEW_SECONDS: Final = 60.0
# Records of one run that are read, bytes of each, and loaders in each, at most.
_MOST_RECORDS: Final = 4096
_MOST_BYTES: Final = 1 << 20
MOST_LOADERS: Final = 256
# Troubles in one record.
MOST_TROUBLES: Final = 32


@dataclass(frozen=True, slots=True)
class LoaderRecord:
    """What one loader has done. Times are seconds."""

    name: str
    # Epochs that have begun; of the last one, its samples (0 while nobody knows) and those that are delivered.
    epochs: int = 0
    epoch_length: int = 0
    epoch_samples: int = 0
    # Samples of all epochs.
    samples: int = 0
    busy: float = 0.0
    waited: float = 0.0
    first_busy: float = 0.0
    first_waited: float = 0.0
    # Batches; and those of them whose samples could not be counted.
    batches: int = 0
    unmeasured: int = 0
    # Bytes of its samples; 0 where nobody knows.
    bytes: float = 0.0
    workers: int = 0
    # Did nothing but what it has opened say its files? And what is not understood of it (cachefs.publishing.notes).
    was_learned: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class TroubleRecord:
    """What has kept reads of the job waiting, or has made them fail (cachefs.messages.Trouble)."""

    # Names it among those of the run.
    key: str
    # How long it was there; for how much of that reads have waited for it; and reads that have failed.
    seconds: float
    waited: float
    failed: int
    # In words.
    line: str


@dataclass(frozen=True, slots=True)
class MountBytes:
    """Bytes that a mount has answered reads with since it began: out of the memory tier, out of the SSD tier, and after
    a fetch."""

    memory: int = 0
    ssd: int = 0
    missed: int = 0


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """What one training process has done."""

    pid: int
    # Is nothing added any more?
    is_final: bool = False
    loaders: list[LoaderRecord] = field(default_factory=list)
    # By mount: at the beginning, and now.
    mounts: dict[str, tuple[MountBytes, MountBytes]] = field(default_factory=dict)
    # Seconds that reads of the job have waited, by what they waited for (`origin`, `peer`, `ssd`, `daemon`); of all its
    # processes on this node.
    stalls: dict[str, float] = field(default_factory=dict)
    # Bytes that other nodes have given it.
    peer_bytes: int = 0
    fetched_bytes: int = 0
    # Why that is not known; empty where it is.
    problem: str = ""
    job: str = ""
    troubles: list[TroubleRecord] = field(default_factory=list)
    # The number of the process that prints the summary which this one belongs to.
    top: str = ""
    # The helper that writes this, as `this_process` names it; empty: not known.
    helper: str = ""

    @property
    def is_awaited(self) -> bool:
        """Returns whether more is to come: the record is not final, and its helper runs, as far as can be seen."""
        namespace, _, number = self.helper.partition("-")
        is_seen = bool(namespace) and namespace == _namespace()
        return not self.is_final and not (is_seen and not os.path.exists(f"/proc/{number}"))


def is_quiet(environment: Mapping[str, str] | None = None) -> bool:
    """Is nothing to be said but problems?"""
    return (os.environ if environment is None else environment).get(QUIET_VARIABLE, "") not in ("", "0")


def new_directory() -> str:
    """A new directory for the processes of a run; empty where none can be made. Those of runs that are over are
    removed."""
    # A run that ends may have removed the user's directory in between: so the first place is tried twice.
    for shared in (Path("/dev/shm"), Path("/dev/shm"), Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            ours = shared / f"cachefs-{os.geteuid()}"
            with contextlib.suppress(FileExistsError):
                ours.mkdir(0o700)
            found = ours.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                continue
            sweep(ours)
            return tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-{_namespace()}-", dir=ours)
    return ""


def sweep(ours: Path) -> None:
    """Remove what killed processes have left in the user's directory: those of runs, and those of helpers."""
    for left in ours.glob(f"{_PREFIX}*"):
        # A container that shares /dev/shm with others does not see their processes.
        if left.name.split("-")[2:3] == [_namespace()] and not os.path.exists(f"/proc/{left.name.split('-')[1]}"):
            shutil.rmtree(left, ignore_errors=True)
    for left in ours.glob(f"*/*/{SOCKET_NAME}"):
        if _is_left(left):
            remove_helper_directory(left.parent)


def _is_left(address: Path) -> bool:
    """Has who made this socket ended, and did not make it a moment ago? Then no listener has it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        if clock.since_1970() - address.lstat().st_ctime < _NEW_SECONDS:
            return False
        asking.setblocking(False)
        return asking.connect_ex(str(address)) == errno.ECONNREFUSED
    return False


def _namespace() -> str:
    """That in which this process has its number; empty where nobody can tell."""
    with contextlib.suppress(OSError):
        return str(os.stat("/proc/self/ns/pid").st_ino)
    return ""


def this_process() -> str:
    """Returns what names this process among those of several containers."""
    return f"{_namespace()}-{os.getpid()}"


def write(record: ProcessRecord) -> None:
    """Leave *record* in the directory of the run, in place of an earlier one of that process."""
    directory = os.environ.get(RUN_VARIABLE)
    if not directory:
        return
    path = Path(directory, f"{record.pid}.json")
    with contextlib.suppress(OSError, ValueError):
        path.with_suffix(".new").write_text(json.dumps(dataclasses.asdict(record)))
        path.with_suffix(".new").replace(path)


def is_first_to_say(line: str) -> bool:
    """Has no process of the run said this line? From now on one has."""
    directory = os.environ.get(RUN_VARIABLE)
    if not directory:
        return True
    name = hashlib.blake2b(line.encode(errors="replace"), digest_size=8).hexdigest()
    try:
        os.close(os.open(Path(directory, f"said-{name}"), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def with_problem(record: ProcessRecord, problem: str) -> ProcessRecord:
    return dataclasses.replace(record, problem=record.problem or problem)


def read_all(directory: str) -> list[ProcessRecord]:
    """What all processes of the run have left, as far as it can be read."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(Path(directory).glob("*.json"))[:_MOST_RECORDS]:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                found.append(_record(json.loads(_bytes_of(path))))
    return found


def _bytes_of(path: Path) -> bytes:
    """The first bytes of a file. Waits for nothing, as who opens a pipe would. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.read(fd, _MOST_BYTES)
    finally:
        os.close(fd)


def remove(directory: str) -> None:
    """The run is over."""
    if os.path.basename(directory).startswith(_PREFIX):
        shutil.rmtree(directory, ignore_errors=True)


def _record(fields: dict[str, Any]) -> ProcessRecord:
    """Raises TypeError, KeyError or ValueError for what is none."""
    return ProcessRecord(
        **{
            **fields,
            "loaders": [LoaderRecord(**one) for one in fields["loaders"]],
            "troubles": [TroubleRecord(**one) for one in fields["troubles"]],
            "mounts": {key: (_bytes(pair[0]), _bytes(pair[1])) for key, pair in fields["mounts"].items()},
        }
    )


def _bytes(fields: Mapping[str, int]) -> MountBytes:
    return MountBytes(**fields)


def summed(records: Sequence[LoaderRecord]) -> LoaderRecord:
    """The loaders of one name as one: those of several ranks."""
    first, epochs = records[0], max(one.epochs for one in records)
    last = [one for one in records if one.epochs == epochs]
    return LoaderRecord(
        name=first.name,
        epochs=epochs,
        epoch_length=sum(one.epoch_length for one in last) if all(one.epoch_length for one in last) else 0,
        epoch_samples=sum(one.epoch_samples for one in last),
        samples=sum(one.samples for one in records),
        busy=sum(one.busy for one in records),
        waited=sum(one.waited for one in records),
        first_busy=sum(one.first_busy for one in records),
        first_waited=sum(one.first_waited for one in records),
        batches=sum(one.batches for one in records),
        unmeasured=sum(one.unmeasured for one in records),
        bytes=sum(one.bytes for one in records),
        workers=first.workers,
        was_learned=any(one.was_learned for one in records),
        note=next((one.note for one in records if one.note), ""),
    )


def worst(records: Iterable[ProcessRecord]) -> list[TroubleRecord]:
    """The troubles of a run, each once, as the process has met it that has had most of it; the longest first."""
    found: dict[str, TroubleRecord] = {}
    for record in records:
        for one in record.troubles:
            known = found.get(one.key, one)
            found[one.key] = max(known, one, key=lambda each: (each.failed, each.seconds))
    return sorted(found.values(), key=lambda one: (-one.failed, -one.seconds))


def largest(records: Iterable[ProcessRecord]) -> dict[str, MountBytes]:
    """By mount: bytes that it has answered reads with while any of the processes ran."""
    first: dict[str, MountBytes] = {}
    last: dict[str, MountBytes] = {}
    for record in records:
        for key, (begin, now) in record.mounts.items():
            first[key] = min(first.get(key, begin), begin, key=_total)
            last[key] = max(last.get(key, now), now, key=_total)
    return {
        key: MountBytes(
            *(max(0, getattr(last[key], name) - getattr(first[key], name)) for name in MountBytes.__dataclass_fields__)
        )
        for key in last
    }


def _total(counted: MountBytes) -> int:
    return counted.memory + counted.ssd + counted.missed
