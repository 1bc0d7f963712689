"""What a running cachefsd does for mounts and for cachectl, over its socket."""

import errno
import grp
import json
import os
import random
import signal
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from cachefs import errors
from cachefs.block import BlockLocation
from cachefs.fetch_frames import fetch_socket_path
from cachefs.identity import IDENTITY_KEY, identity_socket_path, request_identity
from cachefs.job_messages import JobName
from cachefs.messages import (
    DatasetAddRequest,
    DatasetDetail,
    DatasetName,
    DatasetView,
    Empty,
    FetchRequest,
    Selection,
    WarmupProgress,
    WarmupRequest,
)
from cachefs.rpc import (
    CACHED,
    DATASET_ADD,
    DATASET_LIST,
    DATASET_REMOVE,
    DATASET_SHOW,
    EVICT,
    JOB_SHOW,
    PIN,
    REPORT,
    STATUS,
    UNPIN,
    VERIFY,
    WARMUP,
    DaemonClient,
)
from cachefs.segment import segment_path
from tests.daemon import Daemon, block_ref
from tests.fetching import FetchClient, fetch
from tests.mounting import mount_pid, mounted
from tests.servers.scripted import silent_server
from tests.waiting import until

FILES = 30
# A number that no process has.
NOT_SEEN = 2**30


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """FILES small files in three directories, one of several blocks, an empty one and one with an odd name."""
    top = tmp_path / "origin"
    rng = random.Random(7)
    for number in range(FILES):
        path = top / f"class{number % 3}" / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(1000 + 3000 * number))
    (top / "large").write_bytes(rng.randbytes((9 << 20) + 5))
    (top / "empty").touch()
    (top / "odd\udcff name").write_bytes(b"odd")
    return top


@pytest.fixture
def view(daemon: Daemon, origin: Path) -> DatasetView:
    return daemon.add_dataset("images", f"file://{origin}")


def show(daemon: Daemon, name: str = "images") -> DatasetDetail:
    return daemon.client.call(DATASET_SHOW, DatasetName(name=name))


def warm(daemon: Daemon, dataset: str = "images", paths: tuple[bytes, ...] = (), fraction: float = 1) -> WarmupProgress:
    request = WarmupRequest(dataset=dataset, paths=list(paths), fraction=fraction)
    return list(daemon.client.stream_responses(WARMUP, request, timeout=60))[-1]


def cached_paths(daemon: Daemon, *paths: bytes) -> set[bytes]:
    pages = daemon.client.stream_responses(CACHED, Selection(dataset="images", paths=list(paths)), timeout=60)
    return {file.path for page in pages for file in page.files if sum(file.cached) == file.size > 0}


# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_fetched_file_is_the_origins(daemon: Daemon, view: DatasetView, origin: Path) -> None:
    before = daemon.status()
    for path in ("class1/001.jpg", "large", "empty"):
        assert daemon.read(view, path) == (origin / path).read_bytes()
    status = daemon.status()
    assert status.fetched_blocks - before.fetched_blocks == 4
    assert status.fetched_bytes - before.fetched_bytes == (9 << 20) + 5 + 4000
    assert daemon.read(view, "large") == (origin / "large").read_bytes()
    assert daemon.status().origin_requests == status.origin_requests


def test_many_readers_of_one_block_cost_one_request(daemon: Daemon, view: DatasetView) -> None:
    ref, before = block_ref(view, "large", 1), daemon.status()
    with ThreadPoolExecutor(16) as readers:
        answers = list(readers.map(lambda _: daemon.fetch(ref, ref), range(64)))
    assert {block.location for blocks in answers for block in blocks} == {answers[0][0].location}
    status = daemon.status()
    assert status.fetched_blocks - before.fetched_blocks == status.origin_requests - before.origin_requests == 1


def test_blocks_ahead_arrive_without_anybody_waiting(daemon: Daemon, view: DatasetView) -> None:
    refs = [block_ref(view, "large", number) for number in range(3)]
    assert fetch(daemon.socket, refs, ahead=True) == []
    until(lambda: daemon.status().index_blocks >= 3)


def test_one_bad_reference_does_not_spoil_the_others(daemon: Daemon, view: DatasetView) -> None:
    good = block_ref(view, "class0/000.jpg")
    beyond = block_ref(view, "class0/000.jpg", 1)
    unknown = type(good)("0" * 32, 1, 0)
    nowhere = type(good)(view.snapshot, 10**6, 0)
    garbled = block_ref(view, "class0/003.jpg", bad=b"garbage")
    answers = daemon.fetch(beyond, good, unknown, nowhere, garbled)
    assert [answer.errno for answer in answers] == [errno.ENOENT, 0, errno.ENOENT, errno.ENOENT, errno.EIO]
    assert "mount the dataset again" in answers[2].message


def test_a_reader_that_goes_away_does_not_take_the_fetch_along(daemon: Daemon, view: DatasetView) -> None:
    before, client = daemon.status().origin_requests, FetchClient(daemon.socket)
    client.ask(1, FetchRequest(blocks=[block_ref(view, "large", n) for n in range(3)], deadline=20))
    client.close()
    assert daemon.read(view, "large", deadline=20)
    assert daemon.status().origin_requests - before <= 3


def test_a_report_tells_a_mount_all_it_needs(daemon: Daemon, view: DatasetView) -> None:
    before = daemon.status()
    node = daemon.report("m", spec="images", counters={"hits_memory": 3, "hit_bytes_memory": 9, "misses": 2})
    assert node.datasets == [view]
    assert set(node.tiers) == {"memory", "ssd"}
    assert Path(node.index).is_file()
    assert 0 < node.capacity <= 640 << 20
    assert node.read_deadline == 20
    status = daemon.status()
    assert status.instance == node.instance
    assert status.tiers[0].hits - before.tiers[0].hits == 3
    assert status.tiers[0].hit_bytes - before.tiers[0].hit_bytes == 9
    assert status.misses - before.misses == 2
    assert [(mount.mountpoint, mount.alive) for mount in status.mounts] == [("/mnt/m", True)]


def test_counters_of_mounts_that_ended_still_count(daemon: Daemon) -> None:
    before = daemon.status().tiers[1].hits
    daemon.report("m", counters={"hits_ssd": 3})
    daemon.report("m", counters={"hits_ssd": 5}, closing=True)
    daemon.report("n", counters={"hits_ssd": 1})
    status = daemon.status()
    assert status.tiers[1].hits - before == 6
    assert [mount.id for mount in status.mounts] == ["n"]


# --- datasets ---------------------------------------------------------------------------------------------------------


def test_names_a_dataset_cannot_have(daemon: Daemon, origin: Path) -> None:
    for name in ("", ".", "-x", ".x", "a/b", "all", "x" * 65, "snow\u2603", "a b", "x\n"):
        with pytest.raises(errors.ConfigError, match="cannot name a dataset"):
            daemon.add_dataset(name, f"file://{origin}")


def test_adding_what_is_there_tells_the_way_out(daemon: Daemon, view: DatasetView, origin: Path) -> None:
    with pytest.raises(errors.AlreadyExists, match="cachectl dataset refresh images"):
        daemon.add_dataset("images", f"file://{origin}/")
    with pytest.raises(errors.AlreadyExists, match="cachectl dataset rm images"):
        daemon.add_dataset("images", f"file://{origin}/class0")
    assert daemon.client.call(DATASET_LIST, Empty()).datasets == [view]


def test_a_listing_that_fails_leaves_nothing(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    for url, kind in (
        (f"file://{tmp_path}/nowhere", errors.NotFound),
        (f"file://{tmp_path}/nothing", errors.NotFound),
        ("gopher://x/y", errors.ConfigError),
    ):
        with pytest.raises(kind):
            daemon.add_dataset("x", url)
    assert daemon.client.call(DATASET_LIST, Empty()).datasets == []
    assert list((daemon.home / "state" / "snapshots").iterdir()) == []


def test_only_one_listing_of_a_name_at_a_time(daemon: Daemon, origin: Path) -> None:
    with silent_server() as url:
        request = DatasetAddRequest(name="x", url=url)
        first = daemon.client.stream_responses(DATASET_ADD, request, timeout=60)
        next(first)
        with pytest.raises(errors.Busy, match="is being listed"):
            list(daemon.client.stream_responses(DATASET_ADD, request, timeout=60))
        assert next(first).phase == "listing", "it goes on"
        first.close()
    assert until(lambda: _added(daemon, "x", origin)).files == FILES + 3


def _added(daemon: Daemon, name: str, origin: Path) -> DatasetView | None:
    """None while the name is taken."""
    try:
        return daemon.add_dataset(name, f"file://{origin}")
    except errors.Busy:
        return None


def test_a_refresh_says_what_changed_and_keeps_the_old_snapshot(
    daemon: Daemon, view: DatasetView, origin: Path
) -> None:
    before = (origin / "class0/003.jpg").read_bytes()
    assert daemon.read(view, "class0/003.jpg") == before
    (origin / "class0/000.jpg").unlink()
    (origin / "class0/003.jpg").write_bytes(b"changed")
    (origin / "new").write_bytes(b"new")
    last = daemon.refresh_dataset("images")
    assert last.diff is not None
    assert last.dataset is not None
    assert (last.diff.added, last.diff.changed, last.diff.removed) == (1, 1, 1)
    assert daemon.read(last.dataset, "class0/003.jpg") == b"changed"
    assert daemon.read(view, "class0/003.jpg") == before
    assert show(daemon).snapshots == [last.dataset.snapshot, view.snapshot]
    again = daemon.refresh_dataset("images")
    assert again.dataset == last.dataset
    assert again.diff is not None
    assert again.diff.unchanged == last.dataset.files


def test_a_mounted_dataset_is_not_removed(daemon: Daemon, view: DatasetView) -> None:
    # The daemon believes a mount whose process it cannot see: others have 10 s to be at their mount point.
    daemon.report("m", spec=f"images@{view.snapshot[:8]}", pid=NOT_SEEN)
    with pytest.raises(errors.Busy, match="mounted at /mnt/m"):
        daemon.client.call(DATASET_REMOVE, DatasetName(name="images"))
    daemon.report("m", spec="images", closing=True)
    daemon.report("everything", spec="all")
    daemon.client.call(DATASET_REMOVE, DatasetName(name="images"))
    assert list((daemon.home / "state" / "snapshots").iterdir()) == []


@pytest.mark.own_daemon
def test_a_daemon_that_was_killed_knows_its_mounts_at_once(daemon: Daemon, view: DatasetView, tmp_path: Path) -> None:
    saved = daemon.home / "state" / "mounts.json"
    with mounted(daemon.socket, "images", tmp_path / "m") as directory:
        daemon.report("gone", spec="images")
        daemon.report("gone", spec="images", closing=True)
        pid = mount_pid(daemon.client, directory)
        until(lambda: saved.exists() and [one["pid"] for one in json.loads(saved.read_bytes())] == [pid])
        daemon.kill9()
        daemon.start()
        assert [(mount.mountpoint, mount.pid, mount.alive) for mount in daemon.status().mounts] == [
            (str(directory), pid, True)
        ]
        with pytest.raises(errors.Busy, match=f"mounted at {directory}"):
            daemon.client.call(DATASET_REMOVE, DatasetName(name="images"))
    daemon.client.call(DATASET_REMOVE, DatasetName(name="images"), timeout=60)


def test_removing_a_dataset_frees_what_no_other_has(daemon: Daemon, view: DatasetView, origin: Path) -> None:
    part = daemon.add_dataset("part", f"file://{origin}/class1")
    assert warm(daemon).blocks == FILES + 3 + 1
    assert sum(show(daemon, "part").cached.values()) == part.bytes
    freed = daemon.client.call(DATASET_REMOVE, DatasetName(name="images"))
    assert (freed.blocks, freed.bytes) == (FILES + 4 - 10, view.bytes - part.bytes)
    assert sum(show(daemon, "part").cached.values()) == part.bytes
    with pytest.raises(errors.NotFound, match="known: part"):
        show(daemon, "images")
    assert daemon.fetch(type(block_ref(part, "001.jpg"))(view.snapshot, 1, 0))[0].errno == errno.ENOENT


@pytest.mark.own_daemon
def test_everything_is_there_after_a_restart(daemon: Daemon, view: DatasetView, origin: Path) -> None:
    warm(daemon)
    daemon.client.call(PIN, Selection(dataset="images", paths=[b"class2"]))
    content = {path: (origin / path).read_bytes() for path in ("large", "class0/003.jpg")}
    origin.rename(origin.with_name("gone"))
    for restart in (daemon.stop, daemon.kill9):
        restart()
        daemon.start()
        assert {path: daemon.read(view, path) for path in content} == content
        assert daemon.status().origin_requests == 0
        assert show(daemon).dataset == view
        assert show(daemon).pinned == [b"class2"]


@pytest.mark.own_daemon
def test_a_damaged_snapshot_is_told_and_a_refresh_heals_it(daemon: Daemon, view: DatasetView, origin: Path) -> None:
    daemon.stop()
    path = Path(view.path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    daemon.start()
    assert daemon.report().datasets == []
    assert [known.snapshot for known in daemon.client.call(DATASET_LIST, Empty()).datasets] == [""]
    with pytest.raises(errors.SnapshotDamaged, match="cachectl dataset refresh images"):
        show(daemon)
    fresh = daemon.refresh_dataset("images").dataset
    assert fresh is not None
    assert daemon.read(fresh, "large") == (origin / "large").read_bytes()


@pytest.mark.parametrize("noticed", [False, True])
def test_a_snapshot_that_is_truncated_while_in_use_kills_no_daemon(
    daemon: Daemon, view: DatasetView, origin: Path, noticed: bool
) -> None:
    daemon.client.call(PIN, Selection(dataset="images", paths=[b"class0"]))
    ref = block_ref(view, "class1/001.jpg")
    process = daemon.process
    os.truncate(view.path, 8192)
    if noticed:
        until(lambda: any(view.snapshot in one.message for one in daemon.status().errors))
        [answer] = daemon.fetch(ref)
        assert f"{view.path} is damaged" in answer.message
        with pytest.raises(errors.SnapshotDamaged, match="cachectl dataset refresh images"):
            show(daemon)
    assert daemon.refresh_dataset("images").dataset == daemon.report().datasets[0]
    assert daemon.read(view, "class1/001.jpg") == (origin / "class1/001.jpg").read_bytes()
    assert show(daemon).pinned == [b"class0"]
    assert daemon.process is process
    assert process is not None
    assert process.poll() is None


# --- warmups, pins, evictions -----------------------------------------------------------------------------------------


def test_a_warmup_brings_what_it_selects(daemon: Daemon, view: DatasetView) -> None:
    done = warm(daemon, paths=(b"class1/", b"/class1/001.jpg", b"./large"))
    assert (done.state, done.blocks, done.blocks_total, done.failed) == ("done", 13, 13, 0)
    assert cached_paths(daemon) == {b"large", *(b"class1/%03d.jpg" % n for n in range(1, FILES, 3))}
    assert cached_paths(daemon, b"class0") == set()
    half = warm(daemon, paths=(b"class2",), fraction=0.5)
    assert half.blocks == 5
    with pytest.raises(errors.NotFound, match="'nothing/here'"):
        warm(daemon, paths=(b"nothing/here",))
    with pytest.raises(errors.ConfigError, match="fraction"):
        warm(daemon, fraction=0)


def test_a_warmup_takes_no_more_than_fits_and_fetches_little_in_vain(tmp_path: Path) -> None:
    for number in range(100):
        path = tmp_path / "origin" / str(number)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(os.urandom(1 << 20))
    small = {"memory": {"budget": "32MiB", "segment_size": "8MiB"}, "ssd": {"budget": 0}}
    with Daemon(tmp_path / "node", small) as daemon:
        daemon.add_dataset("big", f"file://{tmp_path}/origin")
        done = warm(daemon, "big")
        assert done.state == "done"
        assert done.blocks + done.skipped == 100
        assert 0 < done.blocks <= 32
        status = daemon.status()
        assert status.index_blocks == done.blocks
        assert status.tiers[0].used <= status.tiers[0].budget
        # What was already under way when the first block was refused, but not all that follow.
        assert status.origin_requests < 100


def test_a_warmup_in_the_background(daemon: Daemon, view: DatasetView) -> None:
    replies = list(daemon.client.stream_responses(WARMUP, WarmupRequest(dataset="images", wait=False), timeout=20))
    assert [reply.blocks_total for reply in replies] == [FILES + 4]
    until(lambda: not daemon.status().warmups)
    assert daemon.status().index_blocks == FILES + 4


def test_a_warmup_says_what_it_could_not_bring(daemon: Daemon, view: DatasetView, origin: Path) -> None:
    (origin / "class0/000.jpg").write_bytes(b"changed since")
    done = warm(daemon, paths=(b"class0",))
    assert (done.state, done.blocks, done.failed) == ("failed", 9, 1)
    assert "class0/000.jpg" in done.message


def test_pinned_files_stay_where_others_go(tmp_path: Path) -> None:
    for number in range(60):
        path = tmp_path / "origin" / f"{number:02}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(os.urandom(1 << 18))
    tight = {
        "daemon": {"policy": "lru", "block_size": "1MiB"},
        "memory": {"budget": "6MiB", "segment_size": "2MiB"},
        "ssd": {"budget": 0},
    }
    with Daemon(tmp_path / "node", tight) as daemon:
        view = daemon.add_dataset("images", f"file://{tmp_path}/origin")
        pinned = daemon.client.call(PIN, Selection(dataset="images", paths=[b"01", b"03"]))
        assert (pinned.files, pinned.bytes) == (2, 2 << 18)
        for number in range(60):
            daemon.read(view, f"{number:02}")
        assert {b"01", b"03", b"59"} <= cached_paths(daemon)
        assert b"00" not in cached_paths(daemon)
        daemon.stop()
        daemon.start()
        for number in range(10, 50):
            daemon.read(view, f"{number:02}")
        assert {b"01", b"03"} <= cached_paths(daemon)
        with pytest.raises(errors.NotFound, match="04 is not a pin of images; pinned there: 01, 03"):
            daemon.client.call(UNPIN, Selection(dataset="images", paths=[b"04"]))
        daemon.client.call(UNPIN, Selection(dataset="images"))
        for number in range(10, 50):
            daemon.read(view, f"{number:02}")
        assert not {b"01", b"03"} & cached_paths(daemon)
        assert daemon.client.call(DATASET_SHOW, DatasetName(name="images")).pinned == []


def test_evicting_frees_what_it_selects(daemon: Daemon, view: DatasetView) -> None:
    warm(daemon)
    freed = daemon.client.call(EVICT, Selection(dataset="images", paths=[b"large", b"class0/003.jpg"]))
    assert (freed.blocks, freed.bytes) == (4, (9 << 20) + 5 + 10_000)
    assert not {b"large", b"class0/003.jpg"} & cached_paths(daemon)
    assert daemon.client.call(EVICT, Selection(dataset="images")).blocks == FILES
    assert daemon.status().index_blocks == 0


# --- damage -----------------------------------------------------------------------------------------------------------


def flip_byte(daemon: Daemon, location: BlockLocation) -> None:
    with segment_path(daemon.memory, location.segment).open("r+b") as file:
        file.seek(location.offset + location.length // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x40]))


def test_a_complaint_about_bad_bytes_is_checked_and_repaired(daemon: Daemon, view: DatasetView, origin: Path) -> None:
    path, before = "class2/029.jpg", daemon.status().repairs
    (answer,) = daemon.fetch(block_ref(view, path))
    assert daemon.fetch(block_ref(view, path, bad=answer.location))[0].location == answer.location
    assert daemon.status().repairs == before
    flip_byte(daemon, BlockLocation.unpack(answer.location))
    (repaired,) = daemon.fetch(block_ref(view, path, bad=answer.location))
    assert repaired.location != answer.location
    assert daemon.read(view, path) == (origin / path).read_bytes()
    assert daemon.status().repairs == before + 1


def test_verify_reads_everything_and_drops_what_is_wrong(daemon: Daemon, view: DatasetView, origin: Path) -> None:
    warm(daemon)
    (answer,) = daemon.fetch(block_ref(view, "large", 1))
    flip_byte(daemon, BlockLocation.unpack(answer.location))
    last = list(daemon.client.stream_responses(VERIFY, Empty(), timeout=60))[-1]
    assert (last.blocks, last.bytes, last.repaired, last.done) == (FILES + 4, view.bytes, 1, True)
    assert list(daemon.client.stream_responses(VERIFY, Empty(), timeout=60))[-1].repaired == 0
    assert daemon.read(view, "large") == (origin / "large").read_bytes()


# --- the process ------------------------------------------------------------------------------------------------------


@pytest.mark.own_daemon
def test_its_sockets_are_for_everybody_and_gone_at_the_end(daemon: Daemon) -> None:
    sockets = (daemon.socket, identity_socket_path(daemon.socket), fetch_socket_path(daemon.socket))
    assert [stat.S_IMODE(each.stat().st_mode) for each in sockets] == [0o666, 0o666, 0o666]
    assert daemon.stop() == 0
    assert not any(each.exists() for each in sockets)


@pytest.mark.own_daemon
def test_sockets_that_were_removed_are_there_again(daemon: Daemon) -> None:
    """As cleaners of temporary files do it. The client that was connected goes on."""
    for path in (daemon.socket, identity_socket_path(daemon.socket)):
        path.unlink()
    until(daemon.socket.exists)
    until(identity_socket_path(daemon.socket).exists)
    fresh = DaemonClient(daemon.socket)
    assert fresh.call(STATUS, Empty()).pid == daemon.status().pid
    assert request_identity(daemon.socket)
    with pytest.raises(errors.NotFound, match="no job named"):  # it knows who calls
        fresh.call(JOB_SHOW, JobName(job="x"))
    fresh.close()
    assert "it is there again" in daemon.log.read_text()
    assert daemon.stop() == 0
    assert not daemon.socket.exists()


@pytest.mark.own_daemon
def test_the_socket_of_a_daemon_that_took_the_place_stays(daemon: Daemon) -> None:
    daemon.socket.unlink()
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as visitor:
        other.bind(str(daemon.socket))
        other.listen()
        assert daemon.stop() == 0
        visitor.connect(str(daemon.socket))


@pytest.mark.own_daemon
def test_a_daemon_that_cannot_have_both_sockets_leaves_neither(daemon: Daemon, tmp_path: Path) -> None:
    assert daemon.stop() == 0
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(identity_socket_path(daemon.socket)))
        other.listen()
        daemon.spawn()
        assert daemon.process is not None
        assert daemon.process.wait(30) == 1
        daemon.process = None
    assert "another daemon listens on" in daemon.log.read_text()
    assert not daemon.socket.exists()


@pytest.mark.own_daemon
def test_sigint_stops_in_order(daemon: Daemon) -> None:
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.process.wait(60) == 0
    assert daemon.log.read_text().splitlines()[-1].endswith("stopped")


def test_a_request_it_cannot_read_harms_nobody(daemon: Daemon) -> None:
    channel = grpc.insecure_channel(f"unix:{daemon.socket}")
    identity = ((IDENTITY_KEY, request_identity(daemon.socket)),)
    for nonsense in (b"\xc1 no msgpack", b"\x81\xa4name\xa2\xc3(", b"\x81\xa1x" + b"\x91" * 200_000 + b"\1"):
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(REPORT.path)(nonsense, timeout=5, metadata=identity)
        assert "malformed" in caught.value.details()
    channel.close()
    assert daemon.status().pid > 0
    assert "Traceback" not in daemon.log.read_text()


def test_the_service_manager_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)

        def listen() -> None:
            while not said or said[-1] != "STOPPING=1":
                said.append(manager.recv(100).decode())

        listener = threading.Thread(target=listen)
        listener.start()
        watched = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        with Daemon(tmp_path / "node", environment=watched) as daemon:
            until(lambda: said.count("WATCHDOG=1") >= 3)
            daemon.stop()
        listener.join(60)
    assert said[0] == "READY=1"
    assert said[-1] == "STOPPING=1"
    assert set(said) == {"READY=1", "WATCHDOG=1", "STOPPING=1"}


def test_no_daemon_is_said_at_once(tmp_path: Path) -> None:
    client = DaemonClient(tmp_path / "none")
    with pytest.raises(errors.DaemonUnavailable, match="no daemon answers at"):
        client.call(STATUS, Empty())
    client.close()


@pytest.mark.parametrize("before", ["fresh", "without the group"])
def test_members_of_the_socket_group_can_open_what_a_mount_opens(tmp_path: Path, origin: Path, before: str) -> None:
    shared = {"daemon": {"socket_group": "games"}}
    with Daemon(tmp_path / "node", shared if before == "fresh" else {}) as daemon:
        view = daemon.add_dataset("images", f"file://{origin}")
        daemon.read(view, "class0/000.jpg")
        if before != "fresh":
            (daemon.home / "state").chmod(0o700)  # as an administrator may have made it
            (daemon.ssd / "00000099.seg").symlink_to(origin / "class0/000.jpg")
            daemon.stop()
            daemon.start(shared)
            assert os.stat(origin / "class0/000.jpg").st_gid == 0
            (daemon.ssd / "00000099.seg").unlink()
        index = Path(daemon.report().index)
        group = grp.getgrnam("games").gr_gid
        group_reads = stat.S_IRGRP | stat.S_IXGRP
        for path in (daemon.ssd, daemon.memory, daemon.home / "state", Path(view.path).parent):
            assert path.stat().st_gid == group
            assert path.stat().st_mode & stat.S_IRWXG == group_reads, "what is in it is the daemon's alone"
        for path, bits in (
            (daemon.socket, stat.S_IRGRP | stat.S_IWGRP),
            (index, stat.S_IRGRP),
            (index.with_name(index.name + "-lock"), stat.S_IRGRP | stat.S_IWGRP),
            (Path(view.path), stat.S_IRGRP),
            (next(daemon.memory.glob("*.seg")), stat.S_IRGRP),
        ):
            assert path.stat().st_gid == group
            assert path.stat().st_mode & bits == bits
