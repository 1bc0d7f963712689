"""The child process that lists an origin and builds its snapshot, and what becomes of it when things go wrong."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from cachefs.errors import CachefsError, NotFound, OriginAccessDenied, OriginUnavailable
from cachefs.messages import ListingProgress, OriginOptions
from cachefs.snapshot import Snapshot
from cachefs_bench.listing_server import ListingServer
from cachefs_daemon.datasets.listing import ListingRequest, build_snapshot
from tests.servers.s3 import S3Server
from tests.servers.scripted import silent_server
from tests.waiting import until

BLOCK_SIZE = 4 << 20


def build(
    url: str, directory: Path, meanwhile: Callable[[ListingProgress], None] = lambda progress: None, **options: object
) -> Path:
    async def run() -> Path:
        request = ListingRequest(
            url=url,
            block_size=BLOCK_SIZE,
            directory=str(directory),
            options=OriginOptions(**options),  # type: ignore[arg-type]
        )
        async for step in build_snapshot(request):
            if isinstance(step, Path):
                return step
            meanwhile(step)
        raise AssertionError("the listing ended without a snapshot")

    return asyncio.run(run())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree as origin, and beside it an empty directory `snapshots`."""
    root = tmp_path / "root"
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/one").write_bytes(b"1")
    (root / "two").write_bytes(b"22")
    (root / "link").symlink_to("a")
    (tmp_path / "snapshots").mkdir()
    return root


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "cachefs_daemon.datasets.listing" in child.cmdline()]


@pytest.fixture
def endless() -> Iterator[str]:
    """The URL of what cannot be listed to its end."""
    with silent_server() as url:
        yield url


def test_a_directory_becomes_a_snapshot(tree: Path) -> None:
    steps: list[ListingProgress] = []
    path = build(f"file://{tree}", tree.parent / "snapshots", steps.append)
    snapshot = Snapshot(path)
    assert [snapshot.path(entry.number) for entry in snapshot.walk_files(snapshot.entry(0))] == [b"two", b"a/b/one"]
    assert (snapshot.url, snapshot.block_size, snapshot.bytes) == (f"file://{tree}", BLOCK_SIZE, 3)
    assert snapshot.problems() == [(b"link", "is a symbolic link to a directory")]
    assert {step.phase for step in steps} == {"listing", "building"}
    assert path.name == f"{snapshot.id}.snapshot"


def test_a_bucket_becomes_a_snapshot(radosgw: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in radosgw.environment.items():
        monkeypatch.setenv(name, value)
    radosgw.create_bucket("listing")
    radosgw.put("listing", {"p/x/1": b"1", "p/x/2": b"22", "p/x/": b"", "p//bad": b"", "p/x": b"hidden", "q": b""})
    snapshot = Snapshot(build("s3://listing/p", tmp_path, endpoint_url=radosgw.endpoint))
    assert [snapshot.path(entry.number) for entry in snapshot.walk_files(snapshot.entry(0))] == [b"x/1", b"x/2"]
    assert [key for key, _ in snapshot.problems()] == [b"/bad", b"x"]
    with pytest.raises(NotFound, match="nothing at s3://listing/absent"):
        build("s3://listing/absent", tmp_path, endpoint_url=radosgw.endpoint)
    with pytest.raises(OriginAccessDenied, match="s3://listing/"):
        build("s3://listing/p", tmp_path, endpoint_url=radosgw.endpoint, anonymous=True)


def test_an_empty_directory_is_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match=f"nothing at file://{tmp_path}/empty"):
        build(f"file://{tmp_path}/empty", tmp_path)
    (tmp_path / "empty/link").symlink_to(".")
    with pytest.raises(NotFound, match=r"'link' is a symbolic link to a directory \(1 left out in all\)"):
        build(f"file://{tmp_path}/empty", tmp_path)


def test_a_snapshot_that_cannot_be_written(tree: Path) -> None:
    with pytest.raises(CachefsError, match=f"cannot write a snapshot into {tree}/absent"):
        build(f"file://{tree}", tree / "absent")


def test_a_child_that_dies_is_an_error(endless: str, tmp_path: Path) -> None:
    def kill_child(step: ListingProgress) -> None:
        for child in children():
            child.kill()

    with pytest.raises(OriginUnavailable, match="ended early"):
        build(endless, tmp_path, kill_child)


def test_giving_up_ends_the_child(endless: str, tmp_path: Path) -> None:
    async def one_step() -> None:
        request = ListingRequest(url=endless, block_size=BLOCK_SIZE, directory=str(tmp_path))
        async with aclosing(build_snapshot(request)) as steps:
            await anext(steps)
            assert len(children()) == 1

    asyncio.run(one_step())
    assert children() == []
    assert list(tmp_path.iterdir()) == []


def test_the_child_dies_with_its_parent(endless: str, tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "from cachefs_daemon.datasets.listing import ListingRequest, build_snapshot\n"
        "async def run():\n"
        "    request = ListingRequest(url=sys.argv[1], block_size=4096, directory=sys.argv[2])\n"
        "    async for step in build_snapshot(request):\n"
        "        print('step', flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(run())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, endless, str(tmp_path)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"step\n"
    (child,) = psutil.Process(parent.pid).children()
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


class Held(ListingServer):
    """After so many requests, it answers none any more."""

    def __init__(self, keys: list[str], most: int) -> None:
        super().__init__(keys, 0)
        self.most = most

    def answer(self, target: str) -> bytes | None:
        return super().response_body(target) if self.requests <= self.most else None


def test_a_listing_goes_on_after_its_child_was_killed(
    tmp_path: Path, radosgw: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in radosgw.environment.items():
        monkeypatch.setenv(name, value)
    keys = [f"{number:05}.jpg" for number in range(12_000)]
    journal = tmp_path / "journal"

    async def run() -> tuple[Path, ListingProgress]:
        server = Held(keys, 8)
        async with await asyncio.start_server(server.serve_connection, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            request = ListingRequest(
                url="s3://b",
                block_size=BLOCK_SIZE,
                directory=str(tmp_path),
                options=OriginOptions(endpoint_url=f"http://127.0.0.1:{port}"),
                journal=str(journal),
                save_seconds=0,
            )
            async with aclosing(build_snapshot(request)) as steps:
                async for step in steps:
                    assert isinstance(step, ListingProgress)
                    if step.objects >= 3_000:
                        break
            server.most = 1 << 30
            last = step
            async for step in build_snapshot(request):
                if isinstance(step, Path):
                    return step, last
                last = step
        raise AssertionError("the listing ended without a snapshot")

    path, last = asyncio.run(run())
    snapshot = Snapshot(path)
    assert [snapshot.path(entry.number).decode() for entry in snapshot.walk_files(snapshot.entry(0))] == keys
    assert snapshot.problem_count == 0
    assert last.resumed >= 3_000
    assert not journal.exists()
