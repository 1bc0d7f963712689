import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachefs.errors import ConfigError, NotFound, ObjectChanged, OriginAccessDenied, OriginUnavailable
from cachefs.messages import OriginOptions
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import ObjectRange, Origin, OriginSettings
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.file import origin as file_version
from cachefs_daemon.origin.kinds import open_origin
from tests.waiting import until_async


def opened(url: str, *, mtime_only: bool = False, **settings: Any) -> Origin:
    return open_origin(url, OriginOptions(mtime_only=mtime_only), OriginSettings(max_connections=4, **settings))


def listing(url: str, **settings: Any) -> tuple[dict[bytes, ListedObject], dict[bytes, str]]:
    """(objects, problems) by key."""
    objects: dict[bytes, ListedObject] = {}
    problems: dict[bytes, str] = {}

    async def collect() -> None:
        origin = opened(url, **settings)
        async for batch in origin.list(problems.__setitem__):
            objects.update((found.key, found) for found in batch)
        await origin.close()

    asyncio.run(collect())
    return objects, problems


def part_of(found: ListedObject, offset: int, length: int) -> ObjectRange:
    return ObjectRange(found.key, found.version, found.size, offset, length)


def read(url: str, found: ListedObject, offset: int, length: int, deadline: float = 10, **settings: Any) -> bytes:
    async def once() -> bytes:
        origin = opened(url, **settings)
        try:
            return bytes(await origin.read(part_of(found, offset, length), Deadline.after(deadline)))
        finally:
            await origin.close()

    return asyncio.run(once())


def test_lists_files_of_any_name_and_directories(tmp_path: Path) -> None:
    names = [b"plain", b"sub/deep/er", b"sub/\xff\xfe", b"sp ace%20+", b"new\nline", b"sub2/x"]
    for name in names:
        path = os.path.join(os.fsencode(tmp_path), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(os.fsdecode(path)).write_bytes(name)
    (tmp_path / "empty").mkdir()
    objects, problems = listing(f"file://{tmp_path}")
    assert {key: found.size for key, found in objects.items() if not key.endswith(b"/")} == {
        name: len(name) for name in names
    }
    assert {key for key in objects if key.endswith(b"/")} == {b"sub/", b"sub/deep/", b"sub2/", b"empty/"}
    assert problems == {}
    assert objects[b"plain"].mtime_ns == (tmp_path / "plain").stat().st_mtime_ns


def test_a_directory_larger_than_a_portion(tmp_path: Path) -> None:
    for number in range(5001):
        (tmp_path / str(number)).touch()
    objects, _ = listing(f"file://{tmp_path}")
    assert set(objects) == {b"%d" % number for number in range(5001)}


def test_links_and_special_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "directory").mkdir()
    (tmp_path / "to_file").symlink_to("file")
    (tmp_path / "to_directory").symlink_to("directory")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "broken").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    objects, problems = listing(f"file://{tmp_path}")
    assert {key: found.size for key, found in objects.items()} == {b"file": 5, b"to_file": 5, b"directory/": 0}
    assert set(problems) == {b"to_directory", b"loop", b"broken", b"pipe"}
    assert "link to a directory" in problems[b"to_directory"]
    assert "loop" in problems[b"loop"]
    assert "broken" in problems[b"broken"]
    assert "no regular file" in problems[b"pipe"]


def test_a_path_that_is_too_long_costs_only_what_is_below_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    opened_at = os.open(tmp_path, os.O_RDONLY)
    try:
        for _ in range(20):
            os.mkdir("d" * 250, dir_fd=opened_at)
            deeper = os.open("d" * 250, os.O_RDONLY, dir_fd=opened_at)
            os.close(opened_at)
            opened_at = deeper
    finally:
        os.close(opened_at)
    objects, problems = listing(f"file://{tmp_path}")
    assert b"file" in objects
    assert any("too long" in reason for reason in problems.values())


def test_reads_ranges(tmp_path: Path) -> None:
    (tmp_path / "odd %name").write_bytes(bytes(range(256)) * 1000)
    url = f"file://{tmp_path}"
    found = listing(url)[0][b"odd %name"]
    assert read(url, found, 0, 256_000) == bytes(range(256)) * 1000
    assert read(url, found, 255_990, 10) == bytes(range(246, 256))
    assert read(url, found, 300, 0) == b""


@pytest.mark.parametrize("change", ["append", "rewrite", "delete", "replace by directory", "replace by pipe"])
def test_a_changed_file_is_an_error_that_names_it(tmp_path: Path, change: str) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"before")
    (tmp_path / "other").touch()  # an empty root would be taken for one that is not mounted
    url = f"file://{tmp_path}"
    found = listing(url)[0][b"data"]
    if change == "append":
        path.write_bytes(b"before and after")
    elif change == "rewrite":
        os.utime(path, ns=(1, found.mtime_ns + 1))
    else:
        path.unlink()
        if change == "replace by directory":
            path.mkdir()
        elif change == "replace by pipe":
            os.mkfifo(path)
    with pytest.raises(ObjectChanged, match=f"{path}.*refresh"):
        read(url, found, 0, 6)


def replaced(path: Path, how: str) -> None:
    """Another file of the same size and mtime, as `cp -p`, `rsync -t` and tar leave it."""
    before = path.stat()
    fresh = path if how == "in place" else path.with_name("fresh")
    # The clock of files is coarse: two changes within 4 or 10 ms may have one time.
    while not fresh.exists() or fresh.stat().st_ctime_ns == before.st_ctime_ns:
        fresh.write_bytes(b"B" * before.st_size)
        os.utime(fresh, ns=(before.st_mtime_ns, before.st_mtime_ns))
    fresh.rename(path)


@pytest.mark.parametrize("how", ["in place", "by another file"])
def test_another_file_of_the_same_size_and_mtime_is_another_version(tmp_path: Path, how: str) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"A" * 1000)
    url = f"file://{tmp_path}"
    found = listing(url)[0][b"data"]
    assert read(url, found, 0, 1000) == b"A" * 1000
    replaced(path, how)
    with pytest.raises(ObjectChanged):
        read(url, found, 0, 1000)
    again = listing(url)[0][b"data"]
    assert again.version != found.version
    assert read(url, again, 0, 1000) == b"B" * 1000


def test_a_version_says_what_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x")
    status = path.stat()
    of_earlier_releases = b"1-%d" % status.st_mtime_ns
    without_inode = of_earlier_releases + b"-%d" % status.st_ctime_ns
    assert listing(f"file://{tmp_path}")[0][b"data"].version == without_inode + b"-%d" % status.st_ino
    assert listing(f"file://{tmp_path}", mtime_only=True)[0][b"data"].version == of_earlier_releases
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    monkeypatch.setattr(file_version, "file_system_kinds", lambda: {device: "fuse.sshfs"})
    assert listing(f"file://{tmp_path}")[0][b"data"].version == without_inode
    path.chmod(0o600)  # changes the ctime
    assert file_version.is_version(path.stat(), of_earlier_releases)
    assert not file_version.is_version(path.stat(), without_inode)
    assert not file_version.is_version(path.stat(), of_earlier_releases[:-1])


def test_absolute_links_that_stay_inside_are_followed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "cache").mkdir(parents=True)
    (root / "cache" / "5d41").write_bytes(b"hello")
    (root / "train.bin").symlink_to(root / "cache" / "5d41")
    (tmp_path / "alias").symlink_to(root)
    (root / "by_another_name").symlink_to(tmp_path / "alias" / "train.bin")
    objects, problems = listing(f"file://{root}")
    assert set(objects) == {b"cache/", b"cache/5d41", b"train.bin"}
    assert set(problems) == {b"by_another_name"}  # only names below the dataset's real path are looked up
    assert read(f"file://{root}", objects[b"train.bin"], 1, 3) == b"ell"


def test_links_that_lead_out_are_not_shown_and_not_read(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "data").write_bytes(b"x")
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    (root / "link").symlink_to(secret)
    url = f"file://{root}"
    objects, problems = listing(url)
    assert set(objects) == {b"data"}
    assert "security.follow_symlinks" in problems[b"link"]
    (root / "data").rename(root / "before")
    (root / "data").symlink_to(secret)
    with pytest.raises(OriginAccessDenied, match="link that leads out"):
        read(url, objects[b"data"], 0, 1)


def test_links_that_lead_out_are_followed_where_that_is_allowed(tmp_path: Path) -> None:
    root = tmp_path / "allowed" / "root"
    root.mkdir(parents=True)
    (tmp_path / "allowed" / "other").write_bytes(b"12345")
    (tmp_path / "elsewhere").write_bytes(b"1")
    (root / "near").symlink_to("../other")
    (root / "far").symlink_to(tmp_path / "elsewhere")
    url = f"file://{root}"
    assert set(listing(url, follow_symlinks=True)[0]) == {b"near", b"far"}
    rooted = {"follow_symlinks": True, "file_roots": (str(tmp_path / "allowed"),)}
    objects, problems = listing(url, **rooted)
    assert (set(objects), set(problems)) == ({b"near"}, {b"far"})
    assert read(url, objects[b"near"], 0, 5, **rooted) == b"12345"


def test_datasets_lie_below_the_allowed_roots(tmp_path: Path) -> None:
    (tmp_path / "allowed" / "data").mkdir(parents=True)
    (tmp_path / "allowed" / "data" / "file").touch()
    (tmp_path / "allowed" / "link").symlink_to("/usr")
    (tmp_path / "alias").symlink_to("allowed")
    for root in ("allowed", "alias"):
        assert b"file" in listing(f"file://{tmp_path}/allowed/data", file_roots=(str(tmp_path / root),))[0]
    for elsewhere in (f"{tmp_path}/allowed/link", "/usr", f"{tmp_path}", f"{tmp_path}/allowed/../"):
        with pytest.raises(OriginAccessDenied, match=r"is in none of security.file_roots \(.*allowed\)"):
            listing(f"file://{elsewhere}", file_roots=(str(tmp_path / "allowed"),))


def test_a_directory_that_cannot_be_read_to_its_end_ends_the_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()

    def broken(fd: int) -> Iterator[None]:
        raise OSError(errno.EIO, "Input/output error")
        yield

    monkeypatch.setattr(os, "scandir", broken)
    with pytest.raises(OriginUnavailable, match=f"{tmp_path} cannot be read: Input/output error"):
        listing(f"file://{tmp_path}")


def test_a_vanished_root_is_unavailable(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "data").write_bytes(b"x")
    found = listing(f"file://{root}")[0][b"data"]
    root.rename(tmp_path / "moved")
    for _ in range(2):
        with pytest.raises(OriginUnavailable, match=f"{root} is gone"):
            read(f"file://{root}", found, 0, 1, deadline=1.0)
        if not root.exists():
            root.mkdir()  # as the mount point of a file system that is not mounted
    root.rmdir()
    with pytest.raises(NotFound, match=str(root)):
        listing(f"file://{root}")


def test_a_root_that_comes_back_within_the_deadline_is_read(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "data").write_bytes(b"x")
    found = listing(f"file://{root}")[0][b"data"]
    root.rename(tmp_path / "moved")

    async def scene() -> bytes:
        origin, patience = opened(f"file://{root}"), Deadline.after(30)
        reading = asyncio.create_task(origin.read(part_of(found, 0, 1), patience))
        await until_async(lambda: patience.last_error)
        (tmp_path / "moved").rename(root)
        return bytes(await reading)

    assert asyncio.run(scene()) == b"x"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN])
def test_errors_of_network_file_systems_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / "data").write_bytes(b"x")
    found = listing(f"file://{tmp_path}")[0][b"data"]
    pread, failures = os.pread, [OSError(number, os.strerror(number))] * 2

    def failing(fd: int, length: int, offset: int) -> bytes:
        if failures:
            raise failures.pop()
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "pread", failing)
    assert read(f"file://{tmp_path}", found, 0, 1) == b"x"
    assert not failures


def test_a_file_that_may_not_be_read_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_bytes(b"x")
    found = listing(f"file://{tmp_path}")[0][b"data"]

    def refused(fd: int, length: int, offset: int) -> bytes:
        raise PermissionError(errno.EACCES, "refused")

    monkeypatch.setattr(os, "pread", refused)
    with pytest.raises(OriginAccessDenied, match="data"):
        read(f"file://{tmp_path}", found, 0, 1)


def test_a_read_that_hangs_ends_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_bytes(b"x")
    found = listing(f"file://{tmp_path}")[0][b"data"]
    receiving, sending = os.pipe()
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: os.read(receiving, 1))
    with pytest.raises(OriginUnavailable, match="data"):
        read(f"file://{tmp_path}", found, 0, 1, deadline=0.1)
    os.write(sending, b"x")  # lets the thread end


def test_identity_is_the_path_whatever_the_spelling_of_the_url() -> None:
    spellings = ["file:///a/b", "file:///a/b/", "file://localhost/a//b", "file:///a/./b", "file:///%61/b"]
    assert {opened(url).identity(b"k/x") for url in spellings} == {b"file:/a/b/k/x"}
    assert opened("file:///").identity(b"k") == b"file:/k"


@pytest.mark.parametrize(
    "url", ["file://host/data", "file://data", "file:", "file:///a%00b", "ftp://x/y", "/data", "", "s3:bucket"]
)
def test_malformed_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        opened(url)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not a directory"):
        listing(f"file://{tmp_path}/file")


@pytest.mark.parametrize("url", ["file://tmp/x", "file://", "file://server/data"])
def test_a_url_without_its_third_slash_is_told_so(url: str) -> None:
    with pytest.raises(ConfigError, match="needs three slashes"):
        open_origin(url, OriginOptions(), OriginSettings())
