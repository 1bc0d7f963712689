"""What unmodified programs see under a mount: every call of docs/posix.md on a real FUSE mount."""

import errno
import mmap
import os
import random
import re
import shutil
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import trio

from cachefs.inodes import ENTRY_BITS, read_mounted_snapshot
from cachefs.messages import BlockRef, FetchRequest
from cachefs.mount.reads.fetch_channel import FetchChannelClient
from cachefs.mount_table import mount_points
from cachefs.snapshot import Snapshot
from tests.daemon import Daemon
from tests.mounting import counters, drop_pages, mounted, read_tree
from tests.waiting import until, until_async

DEPTH = 300
COPY = "import shutil, sys; shutil.copytree(*sys.argv[1:])"
ODD_NAMES = [
    b"with space", b"tab\there", b"new\nline", b"latin-1 \xe9\xff", "snow \N{SNOWMAN}".encode(), b"%41+%2B&?#",
    b"back\\slash", b"-rf", b"\x01\x7f", b"quote'\"", b"x" * 255,
]  # fmt: skip


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Odd names, an empty file, a hole, several blocks, an empty directory and a very deep one."""
    top = tmp_path_factory.mktemp("origin")
    rng = random.Random(1)
    for name in ODD_NAMES:
        (top / os.fsdecode(name)).write_bytes(rng.randbytes(100 + len(name)))
    (top / "empty").touch()
    (top / "empty directory").mkdir()
    (top / "one byte").write_bytes(b"x")
    for size in (4095, 4096, 4097, 131071, 131073, 1 << 20, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, 13_000_000):
        (top / f"size-{size}").write_bytes(rng.randbytes(size))
    with (top / "sparse").open("wb") as file:
        file.truncate(9 << 20)
        file.seek(5 << 20)
        file.write(b"in the middle")
    images = top / "images"
    for number in range(200):
        directory = images / f"class{number % 7}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{number:04}.jpg").write_bytes(rng.randbytes(rng.randrange(1, 150_000)))
    deep = os.open(top, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d", dir_fd=deep)
        below = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    fd = os.open("bottom", os.O_WRONLY | os.O_CREAT, dir_fd=deep)
    os.write(fd, b"reached")
    os.close(fd)
    os.close(deep)
    return top


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, tree: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("node")) as running:
        running.add_dataset("tree", f"file://{tree}")
        yield running


@pytest.fixture(scope="module")
def mount(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mounted(daemon.socket, "tree", tmp_path_factory.mktemp("mnt") / "tree") as directory:
        yield directory


def test_the_tree_reads_back_byte_for_byte(tree: Path, mount: Path) -> None:
    expected = read_tree(tree)
    assert read_tree(mount) == expected
    drop_pages(mount)
    assert read_tree(mount) == expected


def test_attributes_are_those_of_the_origin(tree: Path, mount: Path) -> None:
    for name in ("empty", "one byte", "size-13000000", "images/class1/0001.jpg"):
        theirs, ours = os.stat(tree / name), os.stat(mount / name)
        assert (ours.st_size, ours.st_mtime_ns) == (theirs.st_size, theirs.st_mtime_ns)
        assert stat.S_IMODE(ours.st_mode) == 0o644
        assert ours.st_blocks * 512 >= ours.st_size
    assert stat.S_IMODE(os.stat(mount / "images").st_mode) == 0o755
    inodes = [entry.inode() for entry in os.scandir(mount)]
    assert len(set(inodes)) == len(inodes)


@pytest.mark.usefixtures("steady_page_cache")
def test_a_warm_pass_sends_no_request(daemon: Daemon, mount: Path) -> None:
    read_tree(mount / "images")

    def requests_of_a_pass() -> int:
        before = counters(daemon.client, mount)["requests"]
        read_tree(mount / "images")
        return counters(daemon.client, mount)["requests"] - before

    # Now and then the kernel takes a page back in the middle of a pass, so one of a few has to do.
    assert 0 in (requests_of_a_pass() for _ in range(4))


def test_a_pass_cold_in_the_kernel_sends_one_read_per_file(daemon: Daemon, mount: Path) -> None:
    files = len([content for content in read_tree(mount / "images").values() if content is not None])

    def counted_in_a_pass() -> Counter[str]:
        drop_pages(mount / "images")
        before = counters(daemon.client, mount)
        read_tree(mount / "images")
        counted = Counter(counters(daemon.client, mount))
        counted.subtract(before)
        return counted

    # Now and then the kernel takes a page or a directory back in the middle of a pass, so one of a few has to do.
    passes = [counted_in_a_pass()]
    while passes[-1]["requests"] != files and len(passes) < 4:
        passes.append(counted_in_a_pass())
    assert files == passes[-1]["read"] == passes[-1]["requests"] == 200
    for counted in passes:
        assert files <= counted["read"] == counted["hits_memory"] + counted["hits_ssd"]
        assert counted["misses"] == 0


def test_reads_at_any_offset(tree: Path, mount: Path) -> None:
    rng = random.Random(2)
    for name in ("size-13000000", "sparse", "size-4097"):
        with (tree / name).open("rb") as theirs, (mount / name).open("rb") as ours:
            size = os.fstat(ours.fileno()).st_size
            for _ in range(60):
                offset, length = rng.randrange(size + 10), rng.randrange(1, 3 << 20)
                assert os.pread(ours.fileno(), length, offset) == os.pread(theirs.fileno(), length, offset)
            os.posix_fadvise(ours.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert os.pread(ours.fileno(), 10, size) == b""


def test_mmap(tree: Path, mount: Path) -> None:
    with (mount / "size-13000000").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        assert mapping[:] == (tree / "size-13000000").read_bytes()


def test_direct_io(tree: Path, mount: Path) -> None:
    name = "size-13000000"
    fd = os.open(mount / name, os.O_RDONLY | os.O_DIRECT)
    try:
        buffer = mmap.mmap(-1, 16 << 20)
        got = 0
        while count := os.preadv(fd, [memoryview(buffer)[got : got + (2 << 20)]], got):
            got += count
        assert buffer[:got] == (tree / name).read_bytes()
    finally:
        os.close(fd)


def test_a_path_300_deep(mount: Path) -> None:
    fd = os.open(mount, os.O_RDONLY)
    for _ in range(DEPTH):
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    assert os.read(os.open("bottom", os.O_RDONLY, dir_fd=fd), 100) == b"reached"
    assert (mount / "/".join(["d"] * DEPTH) / "bottom").read_bytes() == b"reached"
    os.close(fd)


def test_what_is_not_there(mount: Path) -> None:
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            os.stat(mount / "absent")
    with pytest.raises(NotADirectoryError):
        os.stat(mount / "one byte" / "below")
    with pytest.raises(OSError, match="File name too long"):
        os.stat(mount / ("x" * 256))


WRITES: list[Callable[[Path], object]] = [
    lambda top: (top / "one byte").open("wb"),
    lambda top: (top / "one byte").open("ab"),
    lambda top: (top / "new").open("wb"),
    lambda top: (top / "new").mkdir(),
    lambda top: (top / "one byte").unlink(),
    lambda top: (top / "empty directory").rmdir(),
    lambda top: (top / "one byte").rename(top / "other"),
    lambda top: (top / "new").symlink_to("one byte"),
    lambda top: (top / "new").hardlink_to(top / "one byte"),
    lambda top: os.truncate(top / "one byte", 0),
    lambda top: os.chmod(top / "one byte", 0o777),
    lambda top: os.chown(top / "one byte", 1, 1),
    lambda top: os.utime(top / "one byte"),
    lambda top: os.setxattr(top / "one byte", "user.x", b"y"),
    lambda top: os.removexattr(top / "one byte", "user.cachefs.etag"),
    lambda top: os.mkfifo(top / "new"),
]


@pytest.mark.parametrize("write", WRITES)
def test_whatever_would_write_gets_erofs(mount: Path, write: Callable[[Path], object]) -> None:
    with pytest.raises(OSError, match="Read-only file system") as caught:
        write(mount)
    assert caught.value.errno == errno.EROFS


def test_access(mount: Path) -> None:
    assert os.access(mount / "one byte", os.R_OK)
    assert not os.access(mount / "one byte", os.W_OK)
    assert not os.access(mount / "one byte", os.X_OK)
    assert os.access(mount / "images", os.R_OK | os.X_OK)


def test_a_caller_that_ignores_the_ends_of_its_children_mounts_too(daemon: Daemon, tmp_path: Path) -> None:
    ignore = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    with mounted(daemon.socket, "tree", tmp_path / "m", patch=ignore) as directory:
        assert list(directory.iterdir())


def test_the_kernel_asks_for_no_extended_attributes(daemon: Daemon, mount: Path, tmp_path: Path) -> None:
    """Not on any later pass, whatever programs ask."""
    commands = (
        ["ls", "-lR", mount / "images"],
        ["cp", "-a", mount / "images", tmp_path / "copy"],
        ["tar", "--xattrs", "--acls", "-cf", tmp_path / "tar", "-C", mount, "images"],
        ["find", mount / "images", "-size", "+0", "-perm", "-o=r"],
        [sys.executable, "-c", COPY, mount / "images", tmp_path / "tree"],
    )  # fmt: skip

    def asked_by(command: Sequence[str | Path]) -> dict[str, int]:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.rmtree(tmp_path / "tree", ignore_errors=True)
        before = counters(daemon.client, mount)
        subprocess.run(command, check=True, capture_output=True)
        after = counters(daemon.client, mount)
        return {key: after[key] - before[key] for key in ("lookup", "getattr", "readdir", "getxattr", "other")}

    for command in commands:
        # The first pass may ask. Now and then the kernel forgets a name in a later one, so one of a few has to do.
        passes = [asked_by(command)]
        while any(passes[-1].values()) and len(passes) < 6:
            passes.append(asked_by(command))
        assert not any(passes[-1].values()), (command, passes)
        assert not any(asked["getxattr"] for asked in passes[1:]), (command, passes)
    for ask in (os.listxattr, lambda path: os.getxattr(path, "user.cachefs.tier")):
        with pytest.raises(OSError, match="not supported"):
            ask(mount / "one byte")


def test_extended_attributes_where_they_are_wanted(daemon: Daemon, tree: Path, tmp_path: Path) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "mnt", "xattr") as directory:
        check_extended_attributes(tree, directory)


def check_extended_attributes(tree: Path, mount: Path) -> None:
    path = mount / "size-13000000"
    path.read_bytes()
    assert set(os.listxattr(path)) == {"user.cachefs.etag", "user.cachefs.tier", "user.cachefs.snapshot"}
    listed = (tree / path.name).stat()
    # On some file systems the inode is left out.
    version = b"%d-%d-%d" % (listed.st_size, listed.st_mtime_ns, listed.st_ctime_ns)
    assert os.getxattr(path, "user.cachefs.etag") in (version, version + b"-%d" % listed.st_ino)
    assert os.getxattr(path, "user.cachefs.tier") == b"memory*4"
    assert os.getxattr(mount / "empty", "user.cachefs.tier") == b""
    snapshot = os.getxattr(path, "user.cachefs.snapshot")
    assert re.fullmatch(rb"[0-9a-f]{32}", snapshot)
    assert os.listxattr(mount / "images") == ["user.cachefs.snapshot"]
    assert os.getxattr(mount, "user.cachefs.snapshot") == os.getxattr(mount / "images", "user.cachefs.snapshot")
    with pytest.raises(OSError, match="No data available"):
        os.getxattr(mount / "images", "user.cachefs.tier")
    with pytest.raises(OSError, match="No data available"):
        os.getxattr(path, "user.other")


def test_a_hidden_link_names_the_snapshot(daemon: Daemon, tmp_path: Path, mount: Path) -> None:
    with mounted(daemon.socket, "all", tmp_path / "all") as every:
        slot, snapshot = read_mounted_snapshot(mount)
        assert read_mounted_snapshot(every / "tree")[1] == snapshot
        assert slot == os.stat(mount / "images").st_ino >> ENTRY_BITS
        assert os.readlink(mount / ".cachefs-snapshot") == snapshot
        assert ".cachefs-snapshot" not in os.listdir(mount)
        for elsewhere in (mount / "images" / ".cachefs-snapshot", every / ".cachefs-snapshot"):
            assert not os.path.lexists(elsewhere)
        assert os.stat(mount).st_ino == 1


def test_the_usual_commands_agree_with_a_native_tree(tree: Path, mount: Path) -> None:
    for command in (
        ["find", ".", "-type", "f", "-size", "+100k"],
        ["find", ".", "-printf", "%p %y %s %T@\\n"],
        ["du", "-a", "--apparent-size", "-B1", "images"],
        ["sh", "-c", "cd images && ls -l class1 | awk '{print $5, $9}'"],
        ["sh", "-c", "tar c images | md5sum >/dev/null && find images -type f | sort | xargs md5sum"],
    ):
        theirs, ours = (
            subprocess.run(command, cwd=top, capture_output=True, check=True).stdout for top in (tree, mount)
        )
        if command[0] == "find" and "-printf" in command:
            # A directory has no size and no time of its own at an object store.
            theirs, ours = (b"\n".join(line for line in out.splitlines() if b" f " in line) for out in (theirs, ours))
        if command[0] == "du":
            theirs, ours = (b"\n".join(line for line in out.splitlines() if b".jpg" in line) for out in (theirs, ours))
        assert sorted(theirs.splitlines()) == sorted(ours.splitlines())
        assert ours


def test_statfs_shows_a_full_read_only_file_system(tree: Path, mount: Path) -> None:
    info = os.statvfs(mount)
    total = sum(len(content) for content in read_tree(tree).values() if content is not None)
    assert 0 <= info.f_blocks * info.f_frsize - total < info.f_frsize
    assert info.f_bavail == info.f_bfree == info.f_blocks
    assert info.f_ffree == info.f_files > 200
    assert info.f_flag & os.ST_RDONLY
    assert info.f_namemax == 255


def test_without_zero_open_everything_still_reads(daemon: Daemon, tree: Path, tmp_path: Path) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "mnt", "no_zero_open") as directory:
        assert read_tree(directory) == read_tree(tree)
        assert counters(daemon.client, directory)["open"] > 200


def test_a_dataset_mounts_by_its_url_with_owner_and_umask(daemon: Daemon, tree: Path, tmp_path: Path) -> None:
    with mounted(daemon.socket, f"file://{tree}", tmp_path / "mnt", "uid=1234,gid=2345,umask=077") as directory:
        assert (directory / "one byte").read_bytes() == b"x"
        info = os.stat(directory / "one byte")
        assert (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (1234, 2345, 0o600)
        reading = ["setpriv", "--reuid=4321", "--clear-groups", "cat", str(directory / "one byte")]
        denied = subprocess.run(reading, capture_output=True, text=True, check=False)
        assert denied.returncode != 0
        assert "Permission denied" in denied.stderr


def test_what_is_asked_for_ahead_comes_without_anybody_waiting(tree: Path, tmp_path: Path) -> None:
    with Daemon(tmp_path / "node") as daemon:
        view = daemon.add_dataset("tree", f"file://{tree}")
        snapshot = Snapshot(Path(view.path))
        entry = snapshot.find_path(b"size-13000000")
        assert entry is not None
        snapshot.close()
        blocks = [BlockRef(snapshot=view.snapshot, entry=entry.number, number=number) for number in range(4)]

        async def ask() -> None:
            channel = FetchChannelClient(daemon.socket)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(channel.run)
                await until_async(lambda: not channel.is_disconnected)
                for block in blocks:
                    channel.announce_fetch(FetchRequest(blocks=[block], ahead=True))
                nursery.cancel_scope.cancel()

        trio.run(ask)
        until(lambda: daemon.status().fetched_blocks == 4)


def test_several_datasets_mount_by_their_names_and_come_and_go(daemon: Daemon, tree: Path, tmp_path: Path) -> None:
    origin = tmp_path / "second"
    origin.mkdir()
    (origin / "file").write_bytes(b"first")
    with mounted(daemon.socket, "all", tmp_path / "mnt") as directory:
        assert os.listdir(directory) == ["tree"]
        assert (directory / "tree" / "one byte").read_bytes() == b"x"
        daemon.add_dataset("second", f"file://{origin}")
        until(lambda: sorted(os.listdir(directory)) == ["second", "tree"])
        held = (directory / "second" / "file").open("rb")
        (origin / "file").write_bytes(b"changed")
        (origin / "new").touch()
        daemon.refresh_dataset("second")
        until(lambda: sorted(os.listdir(directory / "second")) == ["file", "new"])
        assert (directory / "second" / "file").read_bytes() == b"changed"
        assert os.fstat(held.fileno()).st_size == len(b"first")
        with mounted(daemon.socket, "tree,second", tmp_path / "two") as two:
            assert sorted(os.listdir(two)) == ["second", "tree"]
            assert [point.source for point in mount_points() if point.path == two] == ["cachefs:tree,second"]
        held.close()
