"""The daemon under faults: killed, stopped under load, with origins and disks that fail."""

import contextlib
import errno
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs import errors, rpc
from cachefs.messages import DatasetAddRequest, DatasetView, FetchRequest, WarmupRequest
from cachefs.rpc import DATASET_ADD, WARMUP
from tests.daemon import Daemon, block_ref
from tests.fetching import FetchClient
from tests.waiting import until

MIB = 1 << 20
# Root without the capabilities that let it read any file.
ORDINARY = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


def make_files(directory: Path, count: int, size: int) -> dict[str, bytes]:
    directory.mkdir(parents=True)
    rng = random.Random(count)
    content = {f"{number:03}": rng.randbytes(size) for number in range(count)}
    for name, data in content.items():
        (directory / name).write_bytes(data)
    return content


def failure(daemon: Daemon, view: DatasetView, path: str, deadline: float = 20) -> tuple[int, str]:
    """Errno and message of a read that must fail."""
    with pytest.raises(OSError, match="origin") as caught:
        daemon.read(view, path, deadline)
    assert caught.value.errno is not None
    return caught.value.errno, str(caught.value)


# --- two daemons, old sockets -----------------------------------------------------------------------------------------


def refused(daemon: Daemon) -> str:
    """What a second daemon says that must not start."""
    daemon.spawn()
    assert daemon.process is not None
    assert daemon.process.wait(60) == 1
    said = daemon.log.read_text()
    assert "Traceback" not in said
    return said


def test_a_second_daemon_on_one_state_directory_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    other = Daemon(tmp_path / "other", {"daemon": {"state_dir": str(daemon.home / "state")}})
    try:
        assert str(daemon.status().pid) in refused(other).splitlines()[-1]
    finally:
        shutil.rmtree(other.memory)
    assert daemon.status().pid


def test_a_second_daemon_on_one_socket_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    other = Daemon(tmp_path / "other", {"daemon": {"socket": str(daemon.socket)}})
    try:
        assert "another daemon listens on" in refused(other)
    finally:
        shutil.rmtree(other.memory)
    assert daemon.status().pid


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    other = Daemon(tmp_path / "other")
    other.socket.write_text("precious")
    try:
        assert "the path of the daemon's socket, is not a socket" in refused(other)
    finally:
        shutil.rmtree(other.memory)
    assert other.socket.read_text() == "precious"


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "node" / "s"))
    with Daemon(tmp_path / "node") as daemon:
        assert daemon.status().pid


# --- the end, orderly and not -----------------------------------------------------------------------------------------


def test_sigterm_under_load_is_orderly_and_loses_nothing(tmp_path: Path) -> None:
    content = make_files(tmp_path / "origin", 300, 200_000)
    with Daemon(tmp_path / "node") as daemon:
        view = daemon.add_dataset("d", f"file://{tmp_path}/origin")
        warmup = daemon.client.stream_responses(WARMUP, WarmupRequest(dataset="d"), timeout=60)
        refs = [block_ref(view, name) for name in content]
        failed: list[errors.CachefsError] = []

        def load() -> None:
            client = FetchClient(daemon.socket)
            try:
                while True:
                    client.call(FetchRequest(blocks=random.sample(refs, 20), deadline=5), timeout=10)
            except errors.CachefsError as error:
                failed.append(error)
            finally:
                client.close()

        loaders = [threading.Thread(target=load) for _ in range(4)]
        for loader in loaders:
            loader.start()
        next(warmup)
        until(lambda: daemon.status().fetched_blocks >= 20)
        assert daemon.stop() == 0
        for loader in loaders:
            loader.join(60)
        assert [type(error) for error in failed] == [errors.DaemonUnavailable] * 4
        assert "Traceback" not in daemon.log.read_text()
        daemon.start()
        kept = daemon.status().index_blocks
        assert kept >= 20
        for name, data in content.items():
            assert daemon.read(view, name) == data
        assert daemon.status().origin_requests == len(content) - kept


def test_killed_again_and_again_under_load_it_is_never_wrong(tmp_path: Path) -> None:
    content = make_files(tmp_path / "origin", 200, 150_000)
    with Daemon(tmp_path / "node", {"memory": {"budget": "24MiB", "segment_size": "8MiB"}}) as daemon:
        view = daemon.add_dataset("d", f"file://{tmp_path}/origin")
        for kill in range(1, 4):
            warmup = daemon.client.stream_responses(WARMUP, WarmupRequest(dataset="d"), timeout=60)
            next(warmup)
            before = daemon.status().index_blocks
            time.sleep(0.02 * kill)
            daemon.kill9()
            with pytest.raises(errors.DaemonUnavailable):
                list(warmup)
            daemon.start()
            assert daemon.status().index_blocks >= before
        for name, data in content.items():
            assert daemon.read(view, name) == data


@pytest.mark.own_daemon
def test_killed_while_it_lists_it_starts_without_a_trace_of_it(daemon: Daemon, tmp_path: Path) -> None:
    make_files(tmp_path / "origin", 5000, 1)
    request = DatasetAddRequest(name="d", url=f"file://{tmp_path}/origin")
    listing = daemon.client.stream_responses(DATASET_ADD, request, timeout=60)
    next(listing)
    daemon.kill9()
    with pytest.raises(errors.DaemonUnavailable):
        list(listing)
    daemon.start()
    assert daemon.status().datasets in (0, 1)
    snapshots = list((daemon.home / "state" / "snapshots").iterdir())
    assert len(snapshots) == daemon.status().datasets


# --- origins ----------------------------------------------------------------------------------------------------------


def test_a_file_that_changed_or_went_is_an_error_that_names_it(daemon: Daemon, tmp_path: Path) -> None:
    content = make_files(tmp_path / "origin", 5, 300_000)
    view = daemon.add_dataset("d", f"file://{tmp_path}/origin")
    assert daemon.read(view, "004") == content["004"]
    (tmp_path / "origin" / "000").write_bytes(content["000"][:-1] + b"!")
    (tmp_path / "origin" / "001").write_bytes(b"shorter")
    (tmp_path / "origin" / "002").unlink()
    (tmp_path / "origin" / "004").unlink()
    for name in ("000", "001", "002"):
        number, message = failure(daemon, view, name)
        assert number == errno.ESTALE
        assert f"origin/{name}" in message
        assert "refresh the dataset" in message
    assert daemon.read(view, "003") == content["003"]
    assert daemon.read(view, "004") == content["004"]
    failures = [one for one in daemon.status().errors if str(tmp_path) in one.subject]
    assert {os.path.basename(failure.subject) for failure in failures} == {"000", "001", "002"}
    assert all(failure.count == 1 for failure in failures)


def test_a_stopped_daemon_ends_a_stream_it_has_begun(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second after it has answered no ping, in place of 15."""
    quick = {name: 1000 for name, value in rpc.CHANNEL_OPTIONS if value == 15_000}
    monkeypatch.setattr(rpc, "CHANNEL_OPTIONS", tuple({**dict(rpc.CHANNEL_OPTIONS), **quick}.items()))
    make_files(tmp_path / "data", 200, 400_000)
    daemon.add_dataset("d", f"file://{tmp_path}/data")
    client = rpc.DaemonClient(daemon.socket)
    progress = client.stream_responses(WARMUP, WarmupRequest(dataset="d"))
    next(progress)
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    # Should it wait for ever, the daemon's end is its end.
    end = threading.Timer(90, daemon.process.kill)
    end.start()
    began = time.monotonic()
    try:
        with pytest.raises(errors.DaemonUnavailable):
            list(progress)
        assert time.monotonic() - began < 60
    finally:
        end.cancel()
        daemon.process.send_signal(signal.SIGCONT)
        client.close()


def test_a_file_in_the_place_of_the_snapshots_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "node" / "state").mkdir(parents=True)
    (tmp_path / "node" / "state" / "snapshots").touch()
    daemon = Daemon(tmp_path / "node")
    try:
        assert "snapshots cannot be used" in refused(daemon).splitlines()[-1]
    finally:
        shutil.rmtree(daemon.memory)


def test_a_directory_that_vanishes_and_comes_back(daemon: Daemon, tmp_path: Path) -> None:
    content = make_files(tmp_path / "origin", 3, 300_000)
    view = daemon.add_dataset("d", f"file://{tmp_path}/origin")
    assert daemon.read(view, "000") == content["000"]
    (tmp_path / "origin").rename(tmp_path / "away")
    # What may come back is asked for until the deadline.
    number, message = failure(daemon, view, "001", deadline=3)
    assert (number, "is its file system mounted?" in message) == (errno.EIO, True)
    with pytest.raises(errors.NotFound, match="there is no directory"):
        daemon.refresh_dataset("d")
    assert daemon.read(view, "000") == content["000"]
    (tmp_path / "away").rename(tmp_path / "origin")
    assert daemon.read(view, "002") == content["002"]
    assert daemon.refresh_dataset("d").dataset == view


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    content = make_files(tmp_path / "origin", 3, 1000)
    (tmp_path / "origin" / "001").chmod(0)
    with Daemon(tmp_path / "node", wrapper=ORDINARY) as daemon:
        view = daemon.add_dataset("d", f"file://{tmp_path}/origin")
        number, message = failure(daemon, view, "001")
        assert (number, "check its owner and mode" in message) == (errno.EACCES, True)
        assert daemon.read(view, "002") == content["002"]


# --- disks ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(directory: Path, size: int) -> Iterator[Path]:
    directory.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0750", "tmpfs", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def test_a_disk_that_fills_up_costs_no_read(tmp_path: Path) -> None:
    content = make_files(tmp_path / "origin", 80, MIB)
    settings = {"memory": {"budget": "24MiB", "segment_size": "8MiB"}, "ssd": {"segment_size": "8MiB"}}
    with small_disk(tmp_path / "node" / "ssd", 40 * MIB) as disk, Daemon(tmp_path / "node", settings) as daemon:
        view = daemon.add_dataset("d", f"file://{tmp_path}/origin")
        for name in list(content)[:15]:
            assert daemon.read(view, name) == content[name]
        with (disk / "somebody elses").open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(MIB))
                file.flush()
        for name, data in content.items():
            assert daemon.read(view, name) == data
        assert "Traceback" not in daemon.log.read_text()


def test_a_disk_that_is_read_only_serves_what_it_has(tmp_path: Path) -> None:
    content = make_files(tmp_path / "origin", 60, MIB)
    settings = {"memory": {"budget": "24MiB", "segment_size": "8MiB"}, "ssd": {"segment_size": "8MiB"}}
    with small_disk(tmp_path / "node" / "ssd", 100 * MIB) as disk, Daemon(tmp_path / "node", settings) as daemon:
        view = daemon.add_dataset("d", f"file://{tmp_path}/origin")
        for name in list(content)[:40]:
            daemon.read(view, name)
        on_disk = daemon.status().tiers[1].blocks
        assert on_disk > 10
        daemon.stop()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        daemon.start()
        assert daemon.status().tiers[1].blocks == on_disk
        for name, data in content.items():
            assert daemon.read(view, name) == data
        tier = daemon.status().tiers[1]
        assert tier.problem
        assert tier.blocks == on_disk
        assert "Traceback" not in daemon.log.read_text()


def test_a_state_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with small_disk(tmp_path / "node" / "state", MIB) as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        daemon = Daemon(tmp_path / "node")
        try:
            said = refused(daemon)
        finally:
            shutil.rmtree(daemon.memory)
    assert str(disk) in said.splitlines()[-1]
