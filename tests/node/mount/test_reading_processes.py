"""Which process reads which file, as a mount tells those who ask."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cachefs.errors import ConfigError
from cachefs.messages import Empty
from cachefs.read_messages import FileRead, ReadsRequest
from cachefs.rpc import ASK_READS, NODE
from tests.daemon import Daemon
from tests.mounting import mounted
from tests.waiting import until

FILES = 40
# Reads files as a library in C does, one for each line that it gets, and says when that is done.
READER = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
os.chdir(sys.argv[1])  # another user may not come here
os.setuid(int(sys.argv[2]))
print(os.getpid(), os.stat("/proc/self/ns/pid").st_ino, flush=True)
for line in sys.stdin:
    fd = libc.open(line.strip().encode(), os.O_RDONLY)
    os.pread(fd, 1 << 20, 0)
    libc.close(fd)
    print("read", flush=True)
"""


@dataclass
class Reader:
    process: "subprocess.Popen[str]"
    pid: int = 0
    namespace: int = 0

    def read(self, path: str) -> None:
        """path: in the mount."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "read\n"


@contextlib.contextmanager
def reader(mount: Path, *wrapper: str, user: int | None = None) -> Iterator[Reader]:
    command = [*wrapper, sys.executable, "-c", READER, str(mount), str(os.getuid() if user is None else user)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, namespace = map(int, process.stdout.readline().split())
        yield Reader(process, pid, namespace)
        assert process.stdin is not None
        process.stdin.close()


@dataclass
class Asker:
    """Asks for the reads of some processes, in a thread, until a test is over."""

    daemon: Daemon
    asked: ReadsRequest
    told: list[FileRead] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.is_over.wait(0.1):
            self.told += self.daemon.client.call(ASK_READS, self.asked).reads

    def wait_for(self, what: Callable[[list[FileRead]], bool]) -> None:
        until(lambda: what(self.told), lambda: self.told)


@contextlib.contextmanager
def asking(daemon: Daemon, namespace: int, *pids: int) -> Iterator[Asker]:
    asker = Asker(daemon, ReadsRequest(asker=f"test-{pids}", namespace=namespace, pids=list(pids)))
    thread = threading.Thread(target=asker.run)
    thread.start()
    try:
        yield asker
    finally:
        asker.is_over.set()
        thread.join()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Path]]:
    top = tmp_path_factory.mktemp("origin")
    for number in range(FILES):
        (top / "a").mkdir(exist_ok=True)
        (top / "a" / f"{number}").write_bytes(b"%d" % number * 5000)
    with Daemon(tmp_path_factory.mktemp("node")) as daemon:
        daemon.add_dataset("numbers", f"file://{top}")
        with mounted(daemon.socket, "numbers", tmp_path_factory.mktemp("mnt") / "m", "workers=1") as mount:
            yield daemon, mount


@pytest.fixture
def fresh() -> Callable[[], str]:
    """Names of files that nobody has read."""
    return lambda: f"a/{next(_numbers)}"


_numbers = iter(range(FILES))


def read_until_told(one: Reader, asker: Asker, fresh: Callable[[], str]) -> str:
    """The mount hears only with a report that somebody asks. Returns the name of a file of which it then told."""
    names = [fresh()]
    deadline = time.monotonic() + 60
    one.read(names[0])
    while not asker.told:
        assert time.monotonic() < deadline
        if len(names) < 8:
            names.append(fresh())
            one.read(names[-1])
        time.sleep(0.3)
    return asker.told[0].path.decode()


def test_reads_are_told_with_process_thread_and_file(node: tuple[Daemon, Path], fresh: Callable[[], str]) -> None:
    daemon, mount = node
    with reader(mount) as one, reader(mount) as other, asking(daemon, one.namespace, one.pid) as asker:
        began = time.monotonic_ns()
        name = read_until_told(one, asker, fresh)
        unasked, last = fresh(), fresh()
        other.read(unasked)
        one.read(last)
        asker.wait_for(lambda told: any(read.path == last.encode() for read in told))
        told = {read.path.decode(): read for read in asker.told}
    assert unasked not in told
    assert {(read.pid, read.thread, read.user) for read in told.values()} == {(one.pid, one.pid, os.getuid())}
    assert told[name].inode == os.stat(mount / name).st_ino
    assert began < told[name].when < told[last].when < time.monotonic_ns()


def test_nothing_is_told_once_nobody_asks(node: tuple[Daemon, Path], fresh: Callable[[], str]) -> None:
    daemon, mount = node
    with reader(mount) as one:
        with asking(daemon, one.namespace, one.pid) as asker:
            read_until_told(one, asker, fresh)
            assert daemon.client.call(NODE, Empty()).asking == [os.getuid()]
        until(lambda: not daemon.client.call(NODE, Empty()).asking)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a pid namespace")
def test_a_process_of_a_container_has_its_own_number(node: tuple[Daemon, Path], fresh: Callable[[], str]) -> None:
    daemon, mount = node
    with reader(mount, "unshare", "--pid", "--fork", "--mount-proc") as one:
        assert one.pid < 10
        assert one.namespace != os.stat("/proc/self/ns/pid").st_ino
        with asking(daemon, one.namespace, one.pid) as asker:
            read_until_told(one, asker, fresh)
        assert {(read.namespace, read.pid) for read in asker.told} == {(one.namespace, one.pid)}


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user")
def test_another_users_reads_are_not_told(node: tuple[Daemon, Path], fresh: Callable[[], str]) -> None:
    daemon, mount = node
    with reader(mount, user=1234) as strange, reader(mount) as own:
        with asking(daemon, own.namespace, own.pid, strange.pid) as asker:
            read_until_told(own, asker, fresh)
            strange.read(fresh())
            last = fresh()
            own.read(last)
            asker.wait_for(lambda told: any(read.path == last.encode() for read in told))
        assert {read.pid for read in asker.told} == {own.pid}


def test_who_asks_for_too_much_is_refused(node: tuple[Daemon, Path]) -> None:
    daemon, _ = node
    with pytest.raises(ConfigError, match="1024 processes"):
        daemon.client.call(ASK_READS, ReadsRequest(asker="a", namespace=1, pids=list(range(2000))))
