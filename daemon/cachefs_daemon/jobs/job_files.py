"""The files that keep jobs across a restart of the daemon: what each has published, and its consumers' positions.

There are two files per job in `<state_dir>/jobs`: `<job>.job` holds the publication, which is megabytes; `<job>.place`
holds the positions, which change all the time. Each file is replaced as a whole and begins with a checksum. The daemon
removes a file that cannot be read, and the job has no plan until it publishes again.
"""

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import xxhash

from cachefs.errors import CachefsError
from cachefs.job_messages import JobPublication, SampleMap
from cachefs_daemon.datasets.stamps import NO_STAMP, ChangeStamp
from cachefs_daemon.runtime.boot_clock import BootMoment

log = logging.getLogger(__name__)

PUBLICATION_SUFFIX: Final = ".job"
POSITIONS_SUFFIX: Final = ".place"
NEW_SUFFIX: Final = ".new"
# Most bytes that are kept of one job: enough for maps and orders of 10 million samples, and the next epoch.
MAX_BYTES: Final = 256 << 20

# (epoch, samples of it that are read) by consumer.
ConsumerPositions = dict[str, tuple[int, int]]


class ConsumerRecord(msgspec.Struct, frozen=True):
    """One consumer of a job."""

    request: JobPublication  # without its map
    map: int  # index of its own map in the job's maps; -1 for none
    snapshot: str  # snapshot id
    pid: int  # of its process, in the daemon's namespace
    born: BootMoment | None  # when its process started; None: it has none that the daemon sees
    orders: dict[int, bytes]  # by epoch, u32 little-endian
    forgotten: list[int] = []  # epochs whose orders were published too far ahead, and are not kept
    refused: list[int] = []  # epochs for whose orders there was no memory


class JobPriority(msgspec.Struct, frozen=True, array_like=True):
    """The weight of a job where jobs share an origin."""

    weight: float = 1.0
    # The change that has set it, so that all nodes of a cluster choose the same one; NO_STAMP: none has.
    change: ChangeStamp = NO_STAMP


NO_PRIORITY: Final = JobPriority()


class JobRecord(msgspec.Struct, frozen=True):
    """The publication of a job."""

    job: str
    source: str
    started: float  # unix seconds
    consumers: list[ConsumerRecord]
    maps: list[SampleMap]  # without duplicates
    latest: dict[str, int]  # by snapshot: index of the map published for it last
    priority: JobPriority = NO_PRIORITY


Content = TypeVar("Content")


class JobFiles:
    """The files of all jobs. Every call blocks; for each job there may be only one call at a time."""

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / "jobs"

    def save(self, record: JobRecord) -> None:
        """Write a job's record. Raises CachefsError where that fails; the previous record then stays."""
        bounded = _bound_record(record)
        if bounded is None:
            log.warning("job %s: its sample maps are too large to outlive a restart of the daemon", record.job)
            self.remove(record.job)
        else:
            self._write(self._path(record.job, PUBLICATION_SUFFIX), msgspec.msgpack.encode(bounded))

    def save_positions(self, job: str, positions: ConsumerPositions) -> None:
        """Write the positions of the job's consumers. Raises CachefsError."""
        self._write(self._path(job, POSITIONS_SUFFIX), msgspec.msgpack.encode(positions))

    def remove(self, job: str) -> None:
        """Remove the files of *job*."""
        for suffix in (PUBLICATION_SUFFIX, POSITIONS_SUFFIX):
            self._path(job, suffix).unlink(missing_ok=True)

    def load(self) -> list[tuple[JobRecord, ConsumerPositions]]:
        """Return the records of the previous daemon. Files that cannot be read are removed."""
        found = []
        for path in sorted(self._directory.glob(f"*{PUBLICATION_SUFFIX}")):
            record = _read(path, JobRecord)
            if record is not None and path == self._path(record.job, PUBLICATION_SUFFIX):
                found.append((record, _read(self._path(record.job, POSITIONS_SUFFIX), ConsumerPositions) or {}))
        kept = {
            self._path(record.job, suffix) for record, _ in found for suffix in (PUBLICATION_SUFFIX, POSITIONS_SUFFIX)
        }
        for path in self._directory.glob("*"):
            if path not in kept and path.is_file():
                path.unlink(missing_ok=True)
        return found

    def _path(self, job: str, suffix: str) -> Path:
        return self._directory / f"{job}{suffix}"

    def _write(self, path: Path, content: bytes) -> None:
        """Replace a file. It is not synced: no job outlives the machine."""
        fresh = path.with_name(path.name + NEW_SUFFIX)
        try:
            self._directory.mkdir(mode=0o750, exist_ok=True)
            fresh.write_bytes(xxhash.xxh3_64_digest(content) + content)
            fresh.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise CachefsError(
                f"{path} cannot be written: {error.strerror}; a restart of the daemon would forget the job's plan"
            ) from None


def _read(path: Path, kind: type[Content]) -> Content | None:
    """Return the content of the file; None where it is missing or damaged."""
    try:
        if path.stat().st_size > 2 * MAX_BYTES:
            raise ValueError("it is too large")
        raw = path.read_bytes()
        content = memoryview(raw)[8:]
        if xxhash.xxh3_64_digest(content) != raw[:8]:
            raise ValueError("its checksum is wrong")
        return msgspec.msgpack.decode(content, type=kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        log.warning("%s cannot be used (%s) and is ignored; the job can publish again", path, error)
        return None


def _bound_record(record: JobRecord) -> JobRecord | None:
    """Return the record without the furthest epochs that would make it too large; None where its maps alone are too
    large."""
    room = MAX_BYTES - sum(len(one.entries) + len(one.offsets) + len(one.lengths) for one in record.maps)
    room -= sum(len(path) for one in record.maps for path in one.paths)
    if room < 0:
        return None
    kept: list[dict[int, bytes]] = [{} for _ in record.consumers]
    for epoch, number in _nearest_orders(record.consumers):
        order = record.consumers[number].orders[epoch]
        room -= len(order)
        if room < 0:
            break
        kept[number][epoch] = order
    consumers = [
        msgspec.structs.replace(
            one, orders=orders, forgotten=sorted({*one.forgotten, *(one.orders.keys() - orders.keys())})
        )
        for one, orders in zip(record.consumers, kept, strict=True)
    ]
    return msgspec.structs.replace(record, consumers=consumers)


def _nearest_orders(consumers: Iterable[ConsumerRecord]) -> list[tuple[int, int]]:
    """Return (epoch, number of the consumer) of all orders, the nearest epochs first."""
    return sorted((epoch, number) for number, one in enumerate(consumers) for epoch in one.orders)
