"""System calls with which training data is read: each does on a mount what it does on a file system."""

import array
import ctypes
import fcntl
import mmap
import os
import select
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.daemon import Daemon
from tests.mounting import mounted

G = 1 << 30
# By offset in a file of 6 GiB, all else of which is a hole at its origin.
MARKS = {0: b"start", 2 * G - 3: b"two-gig", 4 * G - 2: b"four-gig", 5 * G + 4097: b"five", 6 * G - 3: b"end"}
SIZE = 6 * G
SMALL = os.urandom(300_001)
MADV_POPULATE_READ = 22
F_OFD_SETLK = 37
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Files:
    """Descriptors of a large and of a small file, and the paths of the small one on the mount and at its origin."""

    large: int
    small: int
    path: Path
    origin: Path


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    home = tmp_path_factory.mktemp("syscalls")
    (home / "origin").mkdir()
    with (home / "origin" / "large").open("wb") as file:
        for at, text in MARKS.items():
            file.seek(at)
            file.write(text)
    (home / "origin" / "small").write_bytes(SMALL)
    with Daemon(home / "n") as daemon:
        daemon.add_dataset("files", f"file://{home / 'origin'}")
        yield daemon


@pytest.fixture(scope="module", params=["auto", "off"])
def files(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Files]:
    home = tmp_path_factory.mktemp("mnt")
    with mounted(daemon.socket, "files", home / "m", f"shield={request.param}") as mount:
        large, small = (os.open(mount / name, os.O_RDONLY) for name in ("large", "small"))
        try:
            yield Files(large, small, mount / "small", daemon.home.parent / "origin" / "small")
        finally:
            os.close(large)
            os.close(small)


def pread_beyond_4_gib(of: Files) -> bool:
    return {at: os.pread(of.large, len(text), at) for at, text in MARKS.items()} == MARKS


def lseek(of: Files) -> bool:
    """A file on a mount has no holes."""
    ends = [os.lseek(of.large, 0, whence) for whence in (os.SEEK_END, os.SEEK_HOLE)]
    return ends == [SIZE, SIZE] and os.lseek(of.large, 4096, os.SEEK_DATA) == 4096


def mmap_around_4_gib(of: Files) -> bool:
    with mmap.mmap(of.large, 1 << 20, mmap.MAP_SHARED, mmap.PROT_READ, offset=4 * G - (1 << 19)) as window:
        return window[(1 << 19) - 2 : (1 << 19) + 6] == b"four-gig"


def mmap_of_all(of: Files) -> bool:
    with mmap.mmap(of.large, 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as whole:
        whole.madvise(mmap.MADV_WILLNEED, 0, 1 << 20)
        whole.madvise(MADV_POPULATE_READ, 0, 1 << 20)
        whole.madvise(mmap.MADV_RANDOM)
        return whole[SIZE - 3 :] == b"end"


def sendfile(of: Files) -> bool:
    target = os.memfd_create("target")
    try:
        return os.sendfile(target, of.small, 0, len(SMALL)) == len(SMALL) and os.pread(target, len(SMALL), 0) == SMALL
    finally:
        os.close(target)


def splice(of: Files) -> bool:
    reading, writing = os.pipe()
    try:
        got = b""
        while len(got) < len(SMALL):
            got += os.read(reading, os.splice(of.small, writing, 65536, offset_src=len(got)))
        return got == SMALL
    finally:
        os.close(reading)
        os.close(writing)


def copy_file_range(of: Files) -> bool:
    """Either it copies, or it says that the file systems are different, as for any two."""
    target = os.open(of.origin.parents[1], os.O_TMPFILE | os.O_RDWR)
    try:
        copied = os.copy_file_range(of.small, target, len(SMALL), 0, 0)
        return copied > 0 and os.pread(target, copied, 0) == SMALL[:copied]
    except OSError as error:
        return error.errno == 18
    finally:
        os.close(target)


def direct_reads(of: Files) -> bool:
    """Whole blocks; past the end; and a buffer, an offset and a length that are no multiples of anything."""
    file = os.open(of.path, os.O_RDONLY | os.O_DIRECT)
    try:
        view, right = memoryview(mmap.mmap(-1, 1 << 20)), True
        for into, at, length in ((0, 4096, 65536), (0, 0, 524288), (1, 1001, 777)):
            got = os.preadv(file, [view[into : into + length]], at)
            right = right and bytes(view[into : into + got]) == SMALL[at : at + length]
        return right
    finally:
        os.close(file)


def readahead(of: Files) -> bool:
    for advice in (os.POSIX_FADV_WILLNEED, os.POSIX_FADV_SEQUENTIAL, os.POSIX_FADV_RANDOM, os.POSIX_FADV_NOREUSE):
        os.posix_fadvise(of.small, 0, 0, advice)
    return int(LIBC.readahead(of.small, ctypes.c_int64(0), ctypes.c_size_t(len(SMALL)))) == 0


def locks(of: Files) -> bool:
    for lock in (fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_UN):
        fcntl.flock(of.small, lock | fcntl.LOCK_NB)
    for lock in (fcntl.LOCK_SH | fcntl.LOCK_NB, fcntl.LOCK_UN):
        fcntl.lockf(of.small, lock)
    fcntl.fcntl(of.small, F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0))
    return True


def watches(of: Files) -> bool:
    inotify = LIBC.inotify_init()
    try:
        return int(LIBC.inotify_add_watch(inotify, os.fsencode(of.path.parent), 0xFFF)) >= 0
    finally:
        os.close(inotify)


def waits_for_descriptors(of: Files) -> bool:
    poll = select.poll()
    poll.register(of.small, select.POLLIN)
    return select.select([of.small], [], [], 0)[0] == [of.small] and bool(poll.poll(0))


def buffered_reads(of: Files) -> bool:
    into = array.array("B", bytes(len(SMALL)))
    with open(of.path, "rb") as file:
        return file.readinto(into) == len(SMALL) and into.tobytes() == SMALL


CALLS: list[Callable[[Files], bool]] = [
    pread_beyond_4_gib, lseek, mmap_around_4_gib, mmap_of_all, sendfile, splice, copy_file_range, direct_reads,
    readahead, locks, watches, waits_for_descriptors, buffered_reads,
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_system_call(files: Files, call: Callable[[Files], bool]) -> None:
    assert call(files)


@pytest.mark.parametrize(
    "command",
    [
        "cp --sparse=always {file} {new}", "cp --reflink=auto -a {file} {new}", "cat {file} > {new}",
        "dd if={file} of={new} iflag=direct bs=64k status=none",
        "tar -C {mount} --xattrs --acls -c small | tar -xO > {new}",
    ],
    ids=lambda command: " ".join(command.split()[:2]),
)  # fmt: skip
def test_a_program_that_copies(files: Files, tmp_path: Path, command: str) -> None:
    new = tmp_path / "new"
    line = command.format(file=files.path, new=new, mount=files.path.parent)
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert new.read_bytes() == SMALL
