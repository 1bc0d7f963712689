"""A real cachefsd process for tests, with its own directory, socket and log."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import psutil
import pytest

from cachefs.block import MEMORY, PIECE_SIZE, SSD, BlockLocation, block_count, block_key, block_length, pieces_match
from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.job_messages import JobName
from cachefs.messages import (
    BlockRef,
    DatasetAddRequest,
    DatasetName,
    DatasetView,
    Empty,
    FetchedBlock,
    ListingProgress,
    MountReport,
    NodeView,
    OriginOptions,
    Status,
)
from cachefs.rpc import (
    DATASET_ADD,
    DATASET_LIST,
    DATASET_REFRESH,
    DATASET_REMOVE,
    JOB_CANCEL,
    JOB_LIST,
    REPORT,
    STATUS,
    DaemonClient,
)
from cachefs.segment import SegmentReader
from cachefs.snapshot import Snapshot
from cachefs_bench.lab.scratch_node import memory_directory
from tests.fetching import fetch
from tests.waiting import until
from tests.warm_python import warm

COMMAND = Path(sys.executable).with_name("cachefsd")
# The daemon is killed when this process ends. A preexec_fn would do the same, but it makes Python fork, and a fork runs
# the fork handlers of gRPC, whose threads live in this process.
_WITH_PARENT = ["setpriv", "--pdeathsig=KILL"]

# cachefsd imports the others where its configuration or a dataset asks for them.
MODULES = (
    "cachefsd.command",
    "cachefs_cluster.cluster",
    "cachefs_daemon.api.local_http",
    "cachefs_cluster.placement.cooperation",
    "cachefs_cluster.placement.draining",
    "cachefs_cluster.placement.rebalance",
    "cachefs_cluster.placement.cluster_routes",
    "cachefs_daemon.origin.file.origin",
    "cachefs_daemon.origin.s3.origin",
    "cachefs_cluster.peers.plane",
    "cachefs_cluster.reporting.command_executor",
    "cachefs_cluster.reporting.observer_endpoint",
    "cachefs_cluster.reporting.reports",
    "cachefs_cluster.reporting.shard_warmups",
    "cachefs_daemon.fetch_process.__main__",
    "cachefs_cluster.peers.__main__",
    "cachefs_cluster.sharing.snapshot_check",
    "tests.warm_children",
)

# Configuration section -> key -> value.
Sections = Mapping[str, Mapping[str, Any]]

_DEFAULTS: dict[str, dict[str, Any]] = {
    "daemon": {"read_deadline": 20, "log_level": "debug"},
    "memory": {"budget": "128MiB", "segment_size": "16MiB", "min_free": 0},
    "ssd": {"budget": "512MiB", "segment_size": "16MiB", "min_free": 0},
    # Tests count blocks.
    "prefetch": {"guess": False},
}


def block_ref(view: DatasetView, path: str, number: int = 0, bad: bytes = b"") -> BlockRef:
    """Names a block of the file at *path*. *bad* is the packed location at which its bytes were wrong."""
    snapshot = Snapshot(Path(view.path))
    try:
        entry = snapshot.find_path(path.encode())
        assert entry is not None, f"{path} is not in {view.path}"
        return BlockRef(view.snapshot, entry.number, number, bad)
    finally:
        snapshot.close()


class Daemon:
    """A daemon that runs from the start of a `with` block. At the end of the block it is gone, whatever happened."""

    def __init__(
        self,
        home: Path,
        overrides: Sections | None = None,
        environment: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> None:
        """Prepare a daemon whose files are in *home*.

        *overrides* are settings that replace small defaults. *environment* is added to this process's variables.
        *wrapper* is a command that runs the daemon, such as setpriv. Without one the daemon is forked from a process
        that has its modules (tests/warm_python.py).
        """
        home.mkdir(exist_ok=True)
        self.home = home  # holds the state, the SSD tier, the configuration and the log
        self._directories = contextlib.ExitStack()
        self.memory = self._directories.enter_context(memory_directory("cachefs-tests-"))  # the memory tier
        self.ssd = home / "ssd"
        self.socket = home / "s"
        self.log = home / "cachefsd.log"
        self.client: DaemonClient  # since the first start
        self.process: subprocess.Popen[Any] | None = None  # None: it does not run
        self._wrapper = wrapper
        self._environment = {**os.environ, **(environment or {})}
        self._overrides = overrides or {}

    def __enter__(self) -> "Daemon":
        try:
            self.start()
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.stop()
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        self.kill9()
        self._directories.close()

    def start(self, overrides: Sections | None = None) -> None:
        """Start the daemon (again) and wait until it answers. *overrides* replace those it was made with."""
        self.spawn(overrides)
        self.client = DaemonClient(self.socket)
        until(self._answers, lambda: f"cachefsd starts:\n{self.log.read_text()[-4000:]}")

    def _answers(self) -> bool:
        try:
            self.client.call(STATUS, Empty(), timeout=5)
        except DaemonUnavailable:
            assert self.process is not None
            assert self.process.poll() is None, f"cachefsd has ended:\n{self.log.read_text()[-4000:]}"
            return False
        return True

    def spawn(self, overrides: Sections | None = None) -> None:
        """Start the daemon (again), and do not wait until it answers."""
        config = self.write_config(overrides)
        command = [*_WITH_PARENT, *self._wrapper, sys.executable, str(COMMAND), "--config", str(config)]
        start = subprocess.Popen if self._wrapper else warm(*MODULES).start
        with self.log.open("ab") as log:
            self.process = start(command, stdout=log, stderr=log, env=self._environment)

    def write_config(self, overrides: Sections | None = None) -> Path:
        """Write the configuration file for the next start or reload. *overrides* as of `start`. Returns its path."""
        if overrides is not None:
            self._overrides = overrides
        places = {
            "daemon": {"socket": str(self.socket), "state_dir": str(self.home / "state")},
            "memory": {"dir": str(self.memory)},
            "ssd": {"dir": str(self.ssd)},
        }
        lines: list[str] = []
        for section in ("daemon", "memory", "ssd", "origin", "prefetch", "security", "cluster", "metrics", "web"):
            parts = (_DEFAULTS.get(section, {}), places.get(section, {}), self._overrides.get(section, {}))
            values = {key: value for part in parts for key, value in part.items()}
            lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        path = self.home / "cachefsd.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def kill9(self) -> None:
        """Kill the daemon with SIGKILL, if it runs."""
        if self.process is not None:
            self.process.kill()
            self._ended()

    def stop(self) -> int:
        """End the daemon with SIGTERM. Returns its exit status."""
        if self.process is None:
            return 0
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"cachefsd does not stop:\n{self.log.read_text()[-4000:]}") from None
        return self._ended()

    def _ended(self) -> int:
        assert self.process is not None
        status = self.process.wait()
        self.process = None
        with contextlib.suppress(AttributeError):
            self.client.close()
        return status

    def forget(self) -> None:
        """Remove all jobs, mounts and datasets with their blocks, so that the next test finds none.

        Counters and the list of errors stay: tests that share a daemon compare them with what they were before.
        """
        for job in self.client.call(JOB_LIST, Empty()).jobs:
            self.client.call(JOB_CANCEL, JobName(job=job.job))
        for mount in self.status().mounts:
            if mount.pid != os.getpid():
                until(lambda: not psutil.pid_exists(mount.pid), f"{mount.mountpoint} ends")  # noqa: B023
            self.report(mount.id, mount.spec, closing=True)
        for dataset in self.client.call(DATASET_LIST, Empty()).datasets:
            self.client.call(DATASET_REMOVE, DatasetName(name=dataset.name), timeout=60)
        # A block stays that was on its way when its dataset was removed, until others need its room.
        until(lambda: self.status().index_blocks == 0, "the daemon is empty", seconds=5)

    def start_anew(self) -> None:
        """Start the daemon with nothing of what it had."""
        self.kill9()
        for directory in (self.home / "state", self.ssd, self.memory):
            shutil.rmtree(directory, ignore_errors=True)
        self.memory.mkdir(exist_ok=True)
        self.start()

    # --- the calls most tests need --------------------------------------------------------------------------------

    def add_dataset(self, name: str, url: str, options: OriginOptions | None = None) -> DatasetView:
        """List what is at *url*. Returns the dataset."""
        request = DatasetAddRequest(name=name, url=url, options=options or OriginOptions())
        last = list(self.client.stream_responses(DATASET_ADD, request, timeout=60))[-1]
        assert last.dataset is not None
        return last.dataset

    def refresh_dataset(self, name: str) -> ListingProgress:
        """List the dataset again. Returns the last message of the stream."""
        return list(self.client.stream_responses(DATASET_REFRESH, DatasetName(name=name), timeout=60))[-1]

    def status(self) -> Status:
        """What `cachectl status` shows."""
        return self.client.call(STATUS, Empty())

    def report(self, mount: str = "test", spec: str = "none", **fields: Any) -> NodeView:
        """Send what a mount process would report, with these fields of MountReport. Returns the answer."""
        fields = {"mountpoint": f"/mnt/{mount}", "pid": os.getpid(), **fields}
        request = MountReport(id=mount, spec=spec, **fields)
        return self.client.call(REPORT, request)

    def read(self, view: DatasetView, path: str, deadline: float = 20) -> bytes:
        """The bytes of a file as a mount gets them: fetched, then read from the tiers and verified.

        Raises OSError with the errno and the message of the first block that the daemon does not deliver.
        """
        snapshot = Snapshot(Path(view.path))
        try:
            entry = snapshot.find_path(path.encode())
            assert entry is not None, f"{path} is not in {view.path}"
            numbers = range(block_count(entry.size, snapshot.block_size))
            size = snapshot.block_size
        finally:
            snapshot.close()
        wanted = [BlockRef(view.snapshot, entry.number, n, size=block_length(entry.size, size, n)) for n in numbers]
        answers = self.fetch(*wanted, deadline=deadline)
        if early := [ref for ref, answer in zip(wanted, answers, strict=True) if answer.data]:
            # Who takes no bytes waits until they are stored; where no tier can hold them, it gets an error at once.
            self.fetch(*(msgspec.structs.replace(ref, size=0) for ref in early), deadline=deadline)
        return b"".join(
            self.read_block(block_key(entry.content, n), answer) for n, answer in zip(numbers, answers, strict=True)
        )

    def read_block(self, key: bytes, answer: FetchedBlock) -> bytes:
        """The bytes of a block that was fetched. Raises OSError with the daemon's reason where it was not."""
        if answer.errno:
            raise OSError(answer.errno, answer.message)
        if not answer.location:
            assert pieces_match(key, answer.checksums, 0, memoryview(answer.data)), "the bytes in the answer are wrong"
            return answer.data
        location = BlockLocation.unpack(answer.location)
        segments = SegmentReader({MEMORY: self.memory, SSD: self.ssd})
        try:
            buffer = memoryview(bytearray(location.length + 2 * PIECE_SIZE))
            data = segments.read(key, location, 0, location.length, buffer)
        finally:
            segments.close()
        assert data is not None, f"the bytes at {location} are wrong"
        return bytes(data)

    def fetch(self, *blocks: BlockRef, deadline: float = 20) -> list[FetchedBlock]:
        """Ask the daemon for blocks as a mount does. Returns an answer for each. The deadline is in seconds."""
        return fetch(self.socket, blocks, deadline)


@contextlib.contextmanager
def shared_daemon(
    request: pytest.FixtureRequest, running: Callable[[], Daemon], own: Callable[[], Daemon]
) -> Iterator[Daemon]:
    """A daemon for one test: that of its module, which runs, or with the marker `own_daemon` one that *own* makes.

    The daemon of the module is empty for each test. Its counters and its list of errors go on.
    """
    if request.node.get_closest_marker("own_daemon"):
        with own() as daemon:
            yield daemon
        return
    shared = running()
    yield shared
    try:
        shared.forget()
    except (AssertionError, CachefsError):  # the next test is not to fail for what this one left
        shared.start_anew()
