"""Requests that wait, or that ask for much: they do not get into the way of others."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.mount import kernel
from cachefs.mount.device import FuseControlFiles
from tests.daemon import Daemon
from tests.mounting import counters, drop_pages, mounted
from tests.waiting import until

# More than the tasks that pyfuse3 has unless it is told otherwise, and than the kernel sends unless it is told so.
READERS = 120
BYTES = 5000
OPENS = ["zero_open", "no_zero_open"]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    tree, huge = tmp_path_factory.mktemp("origin"), tmp_path_factory.mktemp("huge")
    for opens in OPENS:
        (tree / opens).mkdir()
        for number in range(READERS):
            (tree / opens / f"{number}.bin").write_bytes(bytes([number]) * BYTES)
    (tree / "here.bin").write_bytes(b"here")
    with (huge / "file").open("wb") as file:
        file.truncate(15 << 40)
    with Daemon(tmp_path_factory.mktemp("node"), {"daemon": {"read_deadline": 60}}) as running:
        running.add_dataset("tree", f"file://{tree}")
        running.add_dataset("huge", f"file://{huge}")
        yield running


@pytest.mark.parametrize("opens", OPENS)
def test_reads_that_wait_keep_nobody_from_reading_what_is_here(daemon: Daemon, tmp_path: Path, opens: str) -> None:
    assert daemon.process is not None
    with mounted(daemon.socket, "tree", tmp_path / "mnt", "workers=1", "no_push", "xattr", opens) as mount:
        (mount / "here.bin").read_bytes()
        # A reader has the bytes of a small block before it is in a tier.
        until(lambda: b"origin" not in os.getxattr(mount / "here.bin", "user.cachefs.tier"))
        drop_pages(mount)
        os.listdir(mount / opens)
        number = kernel.connection_number(mount)
        assert number is not None
        connection = FuseControlFiles(number)
        answers: dict[int, bytes] = {}

        def read(number: int) -> None:
            answers[number] = (mount / opens / f"{number}.bin").read_bytes()

        readers = [threading.Thread(target=read, args=(number,)) for number in range(READERS)]
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            for reader in readers:
                reader.start()
            until(lambda: connection.count_waiting() >= READERS, lambda: connection.count_waiting())
            assert (mount / "here.bin").read_bytes() == b"here"
            assert not answers
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        for reader in readers:
            reader.join(60)
        assert answers == {number: bytes([number]) * BYTES for number in range(READERS)}


def test_the_tiers_of_a_huge_file_are_told_of_its_first_blocks(daemon: Daemon, tmp_path: Path) -> None:
    with mounted(daemon.socket, "huge", tmp_path / "mnt", "workers=1", "no_push", "xattr") as mount:
        assert os.getxattr(mount / "file", "user.cachefs.tier") == b"origin*8192 more*3923968"


def test_an_older_kernel_is_asked_to_open_nothing(daemon: Daemon, tmp_path: Path) -> None:
    older = "from cachefs.mount import zero_open\nzero_open.kernel_opens = lambda _: zero_open.KernelOpens({}, {})"
    for files, directories in ((False, False), (True, False)):
        patch = older.format(files, directories)
        # The shield opens directories too.
        options = ("workers=2", "no_push", "shield=off")
        with mounted(daemon.socket, "tree", tmp_path / "mnt", *options, patch=patch) as mount:
            assert sorted(os.listdir(mount)) == ["here.bin", *sorted(OPENS)]
            for _ in range(2):
                assert (mount / "here.bin").read_bytes() == b"here"
            # Each of the workers reports what it has answered.
            asked = until(
                lambda: {name: counters(daemon.client, mount)[name] for name in ("opendir", "open")},
                is_right=lambda asked: asked["opendir"] and asked["open"] >= (1 if files else 2),  # noqa: B023
            )
            assert asked == {"opendir": 1, "open": 1 if files else 2}
            assert "opens are requests" in Path(f"{mount}.log").read_text()
