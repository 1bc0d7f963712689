"""Mounts whose workers, supervisor or pusher are taken away, or stop, under readers."""

import contextlib
import errno
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cachefs.index import IndexReader
from cachefs.messages import DatasetName, Empty
from cachefs.mount import kernel
from cachefs.mount_table import mount_points
from cachefs.rpc import DATASET_REFRESH, NODE, STATUS
from tests.daemon import Daemon, shared_daemon
from tests.mounting import counters, drop_pages, mount_pid, mounted, read_tree
from tests.pushing import cloned_device
from tests.waiting import until

KILLS = 20
READERS = 4
# A mount with less patience than usual, which has to be set when zero-open is loaded.
HURRIED = """
from cachefs.mount import zero_open
load = zero_open.load_interposer
def load_and_hurry():
    library = load()
    from cachefs.mount.processes import supervisor, worker_pool
    {settings}
    return library
zero_open.load_interposer = load_and_hurry
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(8)
    top = tmp_path_factory.mktemp("origin")
    for number in range(150):
        (top / f"{number:03}.bin").write_bytes(rng.randbytes(rng.randrange(1, 200_000)))
    return top


@pytest.fixture(scope="module")
def expected(tree: Path) -> dict[bytes, bytes | None]:
    return read_tree(tree)


@pytest.fixture
def daemon(request: pytest.FixtureRequest, running: Daemon, tmp_path: Path, tree: Path) -> Iterator[Daemon]:
    with shared_daemon(request, lambda: running, lambda: Daemon(tmp_path / "node")) as daemon:
        daemon.add_dataset("tree", f"file://{tree}")
        yield daemon


class Readers:
    """Threads that read cold files; failures: what went wrong; reads: how many went right; slowest: seconds."""

    def __init__(self, mount: Path, expected: dict[bytes, bytes | None]) -> None:
        self.failures: list[object] = []
        self.reads = 0
        self.slowest = 0.0
        self._mount = mount
        self._expected = expected
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._read, args=(seed,)) for seed in range(READERS)]

    def _read(self, seed: int) -> None:
        rng = random.Random(seed)
        names = list(self._expected)
        while not self._stop.is_set():
            name = rng.choice(names)
            began = time.monotonic()
            try:
                with open(os.path.join(os.fsencode(self._mount), name), "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    if file.read() != self._expected[name]:
                        self.failures.append(name)
            except OSError as error:
                self.failures.append(error)
                return
            self.reads += 1
            self.slowest = max(self.slowest, time.monotonic() - began)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


@contextlib.contextmanager
def reading(mount: Path, expected: dict[bytes, bytes | None]) -> Iterator[Readers]:
    readers = Readers(mount, expected)
    readers.start()
    try:
        yield readers
    finally:
        readers.stop()


def supervisor_of(daemon: Daemon, mount: Path) -> psutil.Process:
    return psutil.Process(mount_pid(daemon.client, mount))


def workers(supervisor: psutil.Process) -> list[psutil.Process]:
    return [child for child in supervisor.children() if _name(child).startswith("worker")]


def test_readers_do_not_notice_that_workers_are_killed(
    daemon: Daemon, expected: dict[bytes, bytes | None], tmp_path: Path
) -> None:
    rng = random.Random(9)
    with mounted(daemon.socket, "tree", tmp_path / "mnt", "workers=2", "no_push") as mount:
        supervisor = supervisor_of(daemon, mount)
        with reading(mount, expected) as readers:
            for _ in range(KILLS):
                alive = workers(supervisor)
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since we looked
                    if alive:
                        rng.choice(alive).send_signal(rng.choice((signal.SIGKILL, signal.SIGTERM)))
                time.sleep(rng.uniform(0, 0.2))
            until(lambda: readers.reads > KILLS)
        assert not readers.failures
        until(lambda: len(workers(supervisor)) == 2)
        assert read_tree(mount) == expected


def test_a_request_in_the_hands_of_a_killed_worker_is_answered_by_the_next(
    daemon: Daemon, expected: dict[bytes, bytes | None], tmp_path: Path
) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "mnt", "workers=1", "no_push") as mount:
        supervisor = supervisor_of(daemon, mount)
        (worker,) = workers(supervisor)
        daemon.process.send_signal(signal.SIGSTOP)  # keeps the worker waiting for its block
        answers: list[bytes] = []
        reader = threading.Thread(target=lambda: answers.append((mount / "003.bin").read_bytes()))
        try:
            reader.start()
            time.sleep(0.5)
            worker.kill()
            until(lambda: worker.pid not in [other.pid for other in workers(supervisor)])
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        reader.join(60)
        assert answers == [expected[b"003.bin"]]


def test_a_worker_that_stands_still_is_replaced(
    daemon: Daemon, expected: dict[bytes, bytes | None], tmp_path: Path
) -> None:
    patch = HURRIED.format(settings="supervisor.TICK_SECONDS = 0.3")
    with mounted(daemon.socket, "tree", tmp_path / "mnt", "workers=1", "no_push", patch=patch) as mount:
        supervisor = supervisor_of(daemon, mount)
        (worker,) = workers(supervisor)
        worker.suspend()
        assert (mount / "004.bin").read_bytes() == expected[b"004.bin"]
        until(lambda: not worker.is_running())


def test_when_the_supervisor_is_killed_readers_get_an_error(
    daemon: Daemon, expected: dict[bytes, bytes | None], tmp_path: Path
) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "mnt", "workers=2") as mount:
        supervisor = supervisor_of(daemon, mount)
        family = [supervisor, *supervisor.children()]
        with reading(mount, expected) as readers:
            time.sleep(0.3)
            supervisor.kill()
            until(lambda: len(readers.failures) == READERS)
        assert {error.errno for error in readers.failures if isinstance(error, OSError)} <= {
            errno.ENOTCONN, errno.ECONNABORTED,
        }  # fmt: skip
        until(lambda: not any(process.is_running() for process in family))
        until(lambda: kernel.is_dead(mount))


@pytest.mark.parametrize("survivor", ["guard", "pusher"])
def test_when_all_processes_are_stopped_and_the_supervisor_is_killed_readers_get_an_error(
    daemon: Daemon, tmp_path: Path, survivor: str
) -> None:
    with contextlib.ExitStack() as stack:
        mount = stack.enter_context(mounted(daemon.socket, "tree", tmp_path / "mnt", "workers=1"))
        supervisor = supervisor_of(daemon, mount)
        # Keeps the connection alive, as a process does that cannot die.
        stack.callback(os.close, cloned_device(supervisor.pid))
        for watches in (_is_watching_guard, _is_watching_pusher):
            until(lambda watches=watches: any(map(watches, supervisor.children())))  # type: ignore[misc]
        family = [supervisor, *supervisor.children()]
        for process in family:
            process.suspend()
            stack.callback(_kill, process)
        reader = subprocess.Popen(["cat", mount / "005.bin"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        stack.enter_context(reader)
        stack.callback(reader.kill)
        until(lambda: "wait" in Path(f"/proc/{reader.pid}/wchan").read_text())
        if survivor == "pusher":
            next(process for process in family if _name(process) == "guard").kill()
        supervisor.kill()
        assert b"connect" in reader.communicate(timeout=20)[1]
        until(lambda: not any(process.is_running() for process in family))


@pytest.mark.parametrize("lazy", [False, True])
def test_unmounting_ends_all_processes(daemon: Daemon, tmp_path: Path, lazy: bool) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "mnt", "workers=2") as mount:
        supervisor = supervisor_of(daemon, mount)
        family = [supervisor, *supervisor.children()]
        kernel.unmount(mount, lazy=lazy)
        until(lambda: not any(process.is_running() for process in family))
        until(lambda: not daemon.client.call(STATUS, Empty()).mounts)


def test_a_guard_that_is_killed_is_replaced(daemon: Daemon, tmp_path: Path) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "mnt", "no_push") as mount:
        supervisor = supervisor_of(daemon, mount)
        guards = [child for child in supervisor.children() if _name(child) == "guard"]
        assert len(guards) == 1
        guards[0].kill()
        until(lambda: not guards[0].is_running())
        until(lambda: "guard" in [_name(child) for child in supervisor.children()])


def test_counters_are_summed_over_workers_and_their_deaths(
    daemon: Daemon, expected: dict[bytes, bytes | None], tmp_path: Path
) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "mnt", "workers=2", "no_push") as mount:
        supervisor = supervisor_of(daemon, mount)
        for _ in range(2):
            drop_pages(mount)
            read_tree(mount)
            before = counters(daemon.client, mount)["read"]
            workers(supervisor)[0].kill()
            until(lambda: len(workers(supervisor)) == 2)
        assert before >= 2 * len(expected)
        assert counters(daemon.client, mount)["read"] >= before
        assert len(daemon.client.call(STATUS, Empty()).mounts) == 1


def test_workers_agree_on_datasets_that_come_and_change(daemon: Daemon, tree: Path, tmp_path: Path) -> None:
    with mounted(daemon.socket, "all", tmp_path / "mnt", "workers=3", "no_push") as mount:
        supervisor = supervisor_of(daemon, mount)
        for number in range(4):
            other = tmp_path / f"other{number}"
            other.mkdir()
            (other / "file").write_bytes(b"%d" % number)
            daemon.add_dataset(f"other{number}", f"file://{other}")
            until(lambda name=f"other{number}": name in os.listdir(mount))  # type: ignore[misc]
            # Names, attributes and bytes are each answered by whoever comes first.
            assert (mount / f"other{number}" / "file").read_bytes() == b"%d" % number
        before = os.stat(mount / "other1" / "file").st_ino
        with open(mount / "other1" / "file", "rb") as opened:
            (tmp_path / "other1" / "file").write_bytes(b"fresh")
            list(daemon.client.stream_responses(DATASET_REFRESH, DatasetName(name="other1")))
            until(lambda: os.stat(mount / "other1" / "file").st_size == 5)
            for worker in workers(supervisor):
                worker.kill()
            assert (mount / "other1" / "file").read_bytes() == b"fresh"
            assert os.fstat(opened.fileno()).st_ino == before
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert opened.read() == b"1"


def test_workers_that_keep_crashing_end_the_mount(daemon: Daemon, tmp_path: Path) -> None:
    patch = HURRIED.format(settings="worker_pool.FIRST_PAUSE, worker_pool.MAX_CRASHES = 0.01, 5")
    with mounted(daemon.socket, "tree", tmp_path / "mnt", "workers=1", "no_push", patch=patch) as mount:
        supervisor = supervisor_of(daemon, mount)
        while supervisor.is_running():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since we looked
                for worker in supervisor.children():
                    worker.send_signal(signal.SIGSEGV)
            time.sleep(0.05)
        assert any(point.path == mount for point in mount_points()), "readers would find an empty directory"
        with pytest.raises(OSError, match="not connected"):
            os.stat(mount / "never looked up")
        assert "crash" in Path(f"{mount}.log").read_text()


# A look-up of this name is the end of any worker.
DEADLY = """
import os, signal
from cachefs.snapshot import Snapshot
look_up = Snapshot.lookup
def lookup(self, parent, name):
    if name == b"deadly":
        os.kill(os.getpid(), signal.SIGSEGV)
    return look_up(self, parent, name)
Snapshot.lookup = lookup
"""


def test_a_request_that_has_killed_two_workers_fails(
    daemon: Daemon, expected: dict[bytes, bytes | None], tmp_path: Path
) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "mnt", "workers=2", "no_push", patch=DEADLY) as mount:
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error"):
                os.stat(mount / "deadly")
        log = Path(f"{mount}.log").read_text()
        assert log.count("is replaced") == 4
        assert log.count("has cost 2 workers") == 2
        assert read_tree(mount) == expected


# A look-up of the name `hanging` takes for ever.
HANGING = """
import time
from cachefs.snapshot import Snapshot
look_up = Snapshot.lookup
def lookup(self, parent, name):
    if name == b"hanging":
        time.sleep(1000)
    return look_up(self, parent, name)
Snapshot.lookup = lookup
"""

# A look-up of a name that begins with `stuck` waits for another mount, which SIGKILL does not end once that has taken
# the request. As usual, a mount may be unserved for longer than a worker may be silent.
STUCK = """
import os
from cachefs.snapshot import Snapshot
look_up = Snapshot.lookup
def lookup(self, parent, name):
    if name.startswith(b"stuck"):
        os.stat({path!r})
    return look_up(self, parent, name)
Snapshot.lookup = lookup
""" + HURRIED.format(
    settings="supervisor.TICK_SECONDS = 0.2; "
    "worker_pool.SILENT_SECONDS, worker_pool.UNSERVED_SECONDS, worker_pool.MAX_HANGING = 8, 15, 2"
)


def test_a_mount_whose_workers_hang_in_the_kernel_ends_and_its_readers_get_errors(
    daemon: Daemon, tmp_path: Path
) -> None:
    options = ("workers=1", "no_push", "shield=off")
    stuck = STUCK.format(path=str(tmp_path / "other" / "hanging"))
    failed: list[int | None] = []

    def read(number: int) -> None:
        try:
            os.stat(tmp_path / "mnt" / f"stuck{number}")
        except OSError as error:
            failed.append(error.errno)

    with contextlib.ExitStack() as stack:
        other = stack.enter_context(mounted(daemon.socket, "tree", tmp_path / "other", *options, patch=HANGING))
        slow = supervisor_of(daemon, other)
        slow.suspend()  # it would replace its worker
        stack.callback(slow.kill)
        mount = stack.enter_context(mounted(daemon.socket, "tree", tmp_path / "mnt", *options, patch=stuck))
        supervisor = supervisor_of(daemon, mount)
        readers = [threading.Thread(target=read, args=(number,)) for number in range(4)]
        for reader in readers:
            reader.start()
        until(lambda: not supervisor.is_running())
        for reader in readers:
            reader.join(30)
        assert len(failed) == len(readers)
        assert set(failed) <= {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO}
        assert any(point.path == mount for point in mount_points()), "readers would find an empty directory"
        with pytest.raises(OSError, match="not connected"):
            os.stat(mount / "never looked up")
        log = Path(f"{mount}.log").read_text()
        assert log.count("is replaced") == 2
        assert "workers were killed and do not die" in log


def test_a_worker_that_starts_without_daemon_and_index_serves_and_finds_the_index_when_it_is_there(
    tree: Path, expected: dict[bytes, bytes | None], tmp_path: Path
) -> None:
    sections = {
        "daemon": {"read_deadline": 1},
        "origin": {"read_timeout": 1, "connect_timeout": 1},
    }
    with Daemon(tmp_path / "node", sections) as daemon:
        daemon.add_dataset("tree", f"file://{tree}")
        index = Path(daemon.client.call(NODE, Empty()).index)
        with mounted(daemon.socket, "tree", tmp_path / "mnt", "workers=1", "no_push") as mount:
            supervisor = supervisor_of(daemon, mount)
            assert (mount / "003.bin").read_bytes() == expected[b"003.bin"]
            _await_entry(index)
            drop_pages(mount)
            daemon.kill9()
            (worker,) = workers(supervisor)
            worker.suspend()  # it would log that the index is away
            index.rename(f"{index}.away")
            worker.kill()
            for name in ("003.bin", "004.bin"):
                with pytest.raises(OSError, match="Input/output error"):
                    (mount / name).read_bytes()
            log = Path(f"{mount}.log").read_text()
            assert log.count("is replaced") == 1
            assert log.count("cannot be read") <= 2  # and not with every beat
            Path(f"{index}.away").rename(index)
            until(lambda: _read(mount / "003.bin") == expected[b"003.bin"])
            assert _read(mount / "004.bin") is None
            assert supervisor.is_running()


# No worker can begin to serve once there is a file of this name.
UNABLE = """
import os
from cachefs.errors import CachefsError
from cachefs.mount.processes import worker
class Unable(worker.Worker):
    def __init__(self, *arguments):
        if os.path.exists({path!r}):
            raise CachefsError("it is forbidden")
        super().__init__(*arguments)
worker.Worker = Unable
"""


def test_a_mount_that_no_worker_can_serve_ends_when_it_is_unmounted(daemon: Daemon, tmp_path: Path) -> None:
    forbidden = tmp_path / "forbidden"
    patch = UNABLE.format(path=str(forbidden))
    with mounted(daemon.socket, "tree", tmp_path / "mnt", "workers=1", "no_push", patch=patch) as mount:
        supervisor = supervisor_of(daemon, mount)
        forbidden.touch()
        (worker,) = workers(supervisor)
        worker.kill()
        log = Path(f"{mount}.log")
        until(lambda: "before it served" in log.read_text())
        kernel.unmount(mount, lazy=True)
        until(lambda: not supervisor.is_running())
        said = log.read_text()
        assert "it is forbidden" in said
        assert "no worker has served" not in said


def _await_entry(index: Path) -> None:
    """Wait until the file of the index has a block. The daemon writes it later than it counts the block in a tier, and
    a reader has the bytes of a small block before either."""
    reader = IndexReader(index)
    try:
        until(lambda: list(reader.blocks_of(b"")))
    finally:
        reader.close()


def _read(path: Path) -> bytes | None:
    """None where that fails."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def _is_watching_guard(process: psutil.Process) -> bool:
    """Is it a guard that has begun to watch the supervisor? Before that it has closed its devices."""
    files = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
    return _name(process) == "guard" and "/dev/fuse" not in files


def _is_watching_pusher(process: psutil.Process) -> bool:
    """Is it a pusher that would notice the supervisor's end? It starts threads after that has been seen to."""
    return _name(process) == "pusher" and process.num_threads() > 1


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def _name(process: psutil.Process) -> str:
    """What the process calls itself; `psutil.Process.name` prefers the command line, which a fork shares."""
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        return ""
