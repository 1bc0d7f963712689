"""Records that the processes of one `cachefs run` leave for each other, one small file each, for the summary.

`cachefs run` makes a directory, whose name its processes inherit. The helper of each training process repeatedly writes
the figures of its loaders there, and marks the last ones as final. The process that prints the summary reads all
records. Nothing here raises: a record that cannot be written or read is missing in the summary.
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
from cachefs.publishing.channel import remove_helper_directory as remove_helper_directory

# Variable with the path of the directory.
RUN_VARIABLE: Final = "CACHEFS_RUN"
# Variable that, where it is 1, suppresses the lines about loaders and the summary.
QUIET_VARIABLE: Final = "CACHEFS_QUIET"
# Variable with the number of the run's first Python process, which prints the summary when it ends.
TOP_VARIABLE: Final = "CACHEFS_TOP"
_PREFIX: Final = "run-"
# Age in seconds up to which a socket may still have no listener.
_NEW_SECONDS: Final = 60.0
# Maximum number of records of one run that are read, of bytes of each, and of loaders in each.
_MAX_RECORDS: Final = 4096
_MAX_BYTES: Final = 1 << 20
MAX_LOADERS: Final = 256
# Maximum number of troubles in one record.
MAX_TROUBLES: Final = 32


@dataclass(frozen=True, slots=True)
class LoaderRecord:
    """The figures of one loader. Times are seconds."""

    name: str
    # Epochs that have begun; of the last one, its samples (0 while unknown) and the delivered ones.
    epochs: int = 0
    epoch_length: int = 0
    epoch_samples: int = 0
    # Samples of all epochs.
    samples: int = 0
    busy: float = 0.0
    waited: float = 0.0
    first_busy: float = 0.0
    first_waited: float = 0.0
    # Batches; and those whose samples could not be counted.
    batches: int = 0
    unmeasured: int = 0
    # Bytes of the delivered samples; 0 where unknown.
    bytes: float = 0.0
    workers: int = 0
    # Whether its files were only learned from opened ones; and what is not understood (cachefs.publishing.diagnostics).
    was_learned: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class TroubleRecord:
    """A trouble that has kept reads of the job waiting, or has made them fail (cachefs.messages.Trouble)."""

    # Identifies the trouble in the run.
    key: str
    # Duration; the part of it during which reads have waited; and the number of failed reads.
    seconds: float
    waited: float
    failed: int
    # The text for the user.
    line: str


@dataclass(frozen=True, slots=True)
class MountBytes:
    """Bytes of reads that a mount has answered since it began: from memory, from SSD, and after a fetch."""

    memory: int = 0
    ssd: int = 0
    missed: int = 0


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """The figures of one training process."""

    pid: int
    # Whether no later record will follow.
    is_final: bool = False
    loaders: list[LoaderRecord] = field(default_factory=list)
    # By mount: at the beginning, and now.
    mounts: dict[str, tuple[MountBytes, MountBytes]] = field(default_factory=dict)
    # Seconds that reads of the job on this node have waited, by cause (`origin`, `peer`, `ssd`, `daemon`).
    stalls: dict[str, float] = field(default_factory=dict)
    # Bytes that came from other nodes.
    peer_bytes: int = 0
    fetched_bytes: int = 0
    # Why these figures are unknown; "" where they are known.
    problem: str = ""
    job: str = ""
    troubles: list[TroubleRecord] = field(default_factory=list)
    # The number of the process that prints the summary with this record.
    top: str = ""
    # The helper that writes this record, as named by `process_identity`; "" where unknown.
    helper: str = ""

    @property
    def is_awaited(self) -> bool:
        """Whether a later record is expected: this one is not final, and its helper runs, as far as can be seen."""
        namespace, _, number = self.helper.partition("-")
        is_seen = bool(namespace) and namespace == _namespace()
        return not self.is_final and not (is_seen and not os.path.exists(f"/proc/{number}"))


def is_quiet(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether only problems should be printed."""
    return (os.environ if environment is None else environment).get(QUIET_VARIABLE, "") not in ("", "0")


def make_run_directory() -> str:
    """Make a directory for the processes of a run, and remove those of ended runs. Return "" where none can be made."""
    # The end of another run may remove the user's directory in between, so the first place is tried twice.
    for shared in (Path("/dev/shm"), Path("/dev/shm"), Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            ours = shared / f"cachefs-{os.geteuid()}"
            with contextlib.suppress(FileExistsError):
                ours.mkdir(0o700)
            found = ours.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                continue
            remove_dead_runs(ours)
            return tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-{_namespace()}-", dir=ours)
    return ""


def remove_dead_runs(ours: Path) -> None:
    """Remove directories of killed processes in the user's directory: those of runs, and those of helpers."""
    for left in ours.glob(f"{_PREFIX}*"):
        # A container that shares /dev/shm does not see the processes of others.
        if left.name.split("-")[2:3] == [_namespace()] and not os.path.exists(f"/proc/{left.name.split('-')[1]}"):
            shutil.rmtree(left, ignore_errors=True)
    for left in ours.glob(f"*/*/{SOCKET_NAME}"):
        if _is_dead_socket(left):
            remove_helper_directory(left.parent)


def _is_dead_socket(address: Path) -> bool:
    """Return whether the socket has no listener, and is not so new that its maker may still start to listen."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        if clock.since_1970() - address.lstat().st_ctime < _NEW_SECONDS:
            return False
        connection.setblocking(False)
        return connection.connect_ex(str(address)) == errno.ECONNREFUSED
    return False


def _namespace() -> str:
    """Return the inode of this process's pid namespace; "" where it is unknown."""
    with contextlib.suppress(OSError):
        return str(os.stat("/proc/self/ns/pid").st_ino)
    return ""


def process_identity() -> str:
    """Return a name of this process that is unique across containers."""
    return f"{_namespace()}-{os.getpid()}"


def write_record(record: ProcessRecord) -> None:
    """Write the record to the directory of the run, in place of an earlier one of the same process."""
    directory = os.environ.get(RUN_VARIABLE)
    if not directory:
        return
    path = Path(directory, f"{record.pid}.json")
    with contextlib.suppress(OSError, ValueError):
        path.with_suffix(".new").write_text(json.dumps(dataclasses.asdict(record)))
        path.with_suffix(".new").replace(path)


def is_first_to_print(line: str) -> bool:
    """Return whether no process of the run has printed this line, and mark it as printed."""
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


def read_records(directory: str) -> list[ProcessRecord]:
    """Return the records of all processes of the run that can be read."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(Path(directory).glob("*.json"))[:_MAX_RECORDS]:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                found.append(_decode_record(json.loads(_read_file(path))))
    return found


def _read_file(path: Path) -> bytes:
    """Return the first bytes of a file. O_NONBLOCK keeps opening a pipe from waiting. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.read(fd, _MAX_BYTES)
    finally:
        os.close(fd)


def remove_run(directory: str) -> None:
    """Remove the directory of a run that has ended."""
    if os.path.basename(directory).startswith(_PREFIX):
        shutil.rmtree(directory, ignore_errors=True)


def _decode_record(fields: dict[str, Any]) -> ProcessRecord:
    """Raises TypeError, KeyError or ValueError for an invalid record."""
    return ProcessRecord(
        **{
            **fields,
            "loaders": [LoaderRecord(**one) for one in fields["loaders"]],
            "troubles": [TroubleRecord(**one) for one in fields["troubles"]],
            "mounts": {key: (_decode_bytes(pair[0]), _decode_bytes(pair[1])) for key, pair in fields["mounts"].items()},
        }
    )


def _decode_bytes(fields: Mapping[str, int]) -> MountBytes:
    return MountBytes(**fields)


def sum_loaders(records: Sequence[LoaderRecord]) -> LoaderRecord:
    """Return the sum of the records of one loader's ranks."""
    first, epochs = records[0], max(record.epochs for record in records)
    last = [record for record in records if record.epochs == epochs]
    return LoaderRecord(
        name=first.name,
        epochs=epochs,
        epoch_length=sum(one.epoch_length for one in last) if all(one.epoch_length for one in last) else 0,
        epoch_samples=sum(one.epoch_samples for one in last),
        samples=sum(record.samples for record in records),
        busy=sum(record.busy for record in records),
        waited=sum(record.waited for record in records),
        first_busy=sum(record.first_busy for record in records),
        first_waited=sum(record.first_waited for record in records),
        batches=sum(record.batches for record in records),
        unmeasured=sum(record.unmeasured for record in records),
        bytes=sum(record.bytes for record in records),
        workers=first.workers,
        was_learned=any(record.was_learned for record in records),
        note=next((record.note for record in records if record.note), ""),
    )


def worst_troubles(records: Iterable[ProcessRecord]) -> list[TroubleRecord]:
    """Return each trouble of a run once, as of the process that it affected most; the worst first."""
    found: dict[str, TroubleRecord] = {}
    for record in records:
        for trouble in record.troubles:
            known = found.get(trouble.key, trouble)
            found[trouble.key] = max(known, trouble, key=lambda each: (each.failed, each.seconds))
    return sorted(found.values(), key=lambda one: (-one.failed, -one.seconds))


def bytes_by_mount(records: Iterable[ProcessRecord]) -> dict[str, MountBytes]:
    """Return, by mount, the bytes of the reads that it has answered while any of the processes ran."""
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
