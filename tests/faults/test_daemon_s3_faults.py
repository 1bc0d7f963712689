"""The daemon in front of an S3 server that fails: every read is right, or an error that says what is wrong."""

import base64
import errno
import functools
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from cachefs import errors
from cachefs.block import block_key
from cachefs.messages import BlockRef, DatasetView, OriginOptions, WarmupRequest
from cachefs.rpc import WARMUP
from cachefs.snapshot import Snapshot
from cachefs_bench.lab.ports import free_port
from cachefs_daemon.fetch.block_fetch import OUTAGE_MEMORY_SECONDS
from tests.daemon import Daemon, block_ref, shared_daemon
from tests.servers import faulty
from tests.servers.faulty import Fault, FaultyProxy
from tests.servers.rclone import SECOND
from tests.servers.s3 import S3Server
from tests.waiting import until

SIZE = 300_000
BLOCK = 128 << 10
QUICK: dict[str, dict[str, int]] = {
    "daemon": {"block_size": BLOCK, "read_deadline": 4},
}


@pytest.fixture(scope="module")
def content(radosgw: S3Server) -> dict[str, bytes]:
    rng = random.Random(11)
    return {f"{number:03}": rng.randbytes(SIZE) for number in range(12)}


@pytest.fixture(scope="module")
def bucket(radosgw: S3Server, content: dict[str, bytes]) -> str:
    return fill(radosgw, "daemon-faults", content)


@pytest.fixture
def proxy(radosgw: S3Server) -> Iterator[FaultyProxy]:
    with faulty.running(radosgw.endpoint) as running:
        yield running


@pytest.fixture
def read_deadline() -> int:
    """Of the daemon. Tests in which a read fails for want of an answer have a shorter one."""
    return 20


@pytest.fixture(scope="module")
def running(radosgw: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Daemon]]:
    """The daemon of the module with this deadline of reads. It is started by its first test."""
    with ExitStack() as stack:
        yield functools.cache(
            lambda deadline: stack.enter_context(made(tmp_path_factory.mktemp("node"), radosgw, deadline))
        )


@pytest.fixture
def daemon(
    request: pytest.FixtureRequest,
    running: Callable[[int], Daemon],
    tmp_path: Path,
    radosgw: S3Server,
    read_deadline: int,
) -> Iterator[Daemon]:
    own = partial(made, tmp_path / "node", radosgw, read_deadline)
    with shared_daemon(request, partial(running, read_deadline), own) as daemon:
        yield daemon


def made(home: Path, server: S3Server, read_deadline: int) -> Daemon:
    return Daemon(home, {"daemon": {**QUICK["daemon"], "read_deadline": read_deadline}}, server.environment)


@pytest.fixture
def view(daemon: Daemon, proxy: FaultyProxy, bucket: str) -> DatasetView:
    return daemon.add_dataset("d", f"s3://{bucket}/data", options(proxy.endpoint))


def options(endpoint: str) -> OriginOptions:
    return OriginOptions(endpoint_url=endpoint, addressing_style="path")


def fill(server: S3Server, bucket: str, content: dict[str, bytes]) -> str:
    server.create_bucket(bucket)
    server.put(bucket, {f"data/{key}": data for key, data in content.items()})
    return bucket


def failure(daemon: Daemon, view: DatasetView, path: str) -> tuple[int | None, str]:
    with pytest.raises(OSError, match=path) as caught:
        daemon.read(view, path)
    return caught.value.errno, str(caught.value)


def read_at_last(daemon: Daemon, view: DatasetView, path: str) -> bytes:
    """The bytes of a file that can be read, though a busy machine may need longer than a short deadline."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return daemon.read(view, path)
        except OSError as error:
            if "no answer in time" not in str(error) or time.monotonic() > deadline:
                raise


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda: Fault("/data/", times=4, truncate=1000), id="truncated"),
        pytest.param(lambda: Fault("/data/", times=4, drop=True), id="dropped"),
        pytest.param(lambda: Fault("/data/", times=4, status=503), id="throttled"),
    ],
)
def test_what_passes_is_repeated(
    daemon: Daemon, view: DatasetView, proxy: FaultyProxy, content: dict[str, bytes], fault: Callable[[], Fault]
) -> None:
    before = daemon.status()
    proxy.add(fault())
    assert daemon.read(view, "003") == content["003"]
    assert proxy.count(path="/data/003") == 3 + 4
    status = daemon.status()
    assert status.origin_requests - before.origin_requests == 3 + 4
    assert status.origin_errors - before.origin_errors == 4
    assert status.errors == before.errors


@pytest.mark.parametrize("read_deadline", [2])
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault("/data/003", times=None, truncate=1000), id="truncated"),
        pytest.param(Fault("/data/003", times=None, extra=b"surplus"), id="longer"),
        pytest.param(Fault("/data/003", times=None, status=503), id="throttled"),
    ],
)
def test_what_does_not_pass_is_an_error_and_nothing_is_kept(
    daemon: Daemon, view: DatasetView, proxy: FaultyProxy, content: dict[str, bytes], fault: Fault
) -> None:
    proxy.add(fault)
    number, message = failure(daemon, view, "003")
    assert number in (errno.EIO, errno.ESTALE)
    assert "data/003" in message
    assert daemon.status().index_blocks == 0
    assert daemon.status().errors[0].subject.endswith("/data/003")
    assert read_at_last(daemon, view, "004") == content["004"]


def reads(daemon: Daemon, view: DatasetView) -> list[Callable[[], bytes]]:
    """Each reads one file of one block, and may be called in any thread."""

    def read(key: bytes, ref: BlockRef) -> bytes:
        return daemon.read_block(key, daemon.fetch(ref)[0])

    snapshot = Snapshot(Path(view.path))
    entries = sorted(snapshot.walk_files(snapshot.entry(0)), key=lambda entry: snapshot.path(entry.number))
    found = [partial(read, block_key(one.content, 0), BlockRef(view.snapshot, one.number, 0)) for one in entries]
    snapshot.close()
    return list(found)


def test_an_answer_that_is_cut_at_any_byte_is_asked_for_again(daemon: Daemon, radosgw: S3Server) -> None:
    """The last answers are whole, with some 370 bytes, so there is one that is cut at each of its bytes."""
    contents, before = {f"{number:03}": b"%03d" % number for number in range(450)}, daemon.status()
    fill(radosgw, "cuts", contents)
    with faulty.running(radosgw.endpoint) as proxy:
        view = daemon.add_dataset("d", "s3://cuts/data", options(proxy.endpoint))
        proxy.add(*(Fault(f"/data/{key}", cut=int(key), reset=int(key) % 2 > 0) for key in contents))
        with ThreadPoolExecutor(16) as readers:
            found = list(readers.map(lambda read: read(), reads(daemon, view)))
        asked = [proxy.count(path=f"/data/{key}") for key in contents]
        assert daemon.status().errors == before.errors
    assert found == list(contents.values())
    assert asked.index(1) > 300


@pytest.mark.parametrize("read_deadline", [2])
def test_one_wrong_byte_reaches_no_reader_and_no_tier(daemon: Daemon, radosgw: S3Server) -> None:
    right = random.Random(3).randbytes(1000)
    wrong = right[:500] + bytes([right[500] ^ 1]) + right[501:]
    fill(radosgw, "wrong", {"once": right, "always": right})
    checksum = {"x-amz-checksum-sha256": base64.b64encode(hashlib.sha256(right).digest()).decode()}
    with faulty.running(radosgw.endpoint) as proxy:
        view = daemon.add_dataset("d", "s3://wrong/data", options(proxy.endpoint))
        proxy.add(*(Fault(f"/data/{key}", replace=wrong, headers=checksum, times=times)
                    for key, times in (("once", 1), ("always", None))))  # fmt: skip
        assert read_at_last(daemon, view, "once") == right
        assert proxy.count(path="/data/once") >= 2
        number, message = failure(daemon, view, "always")
        assert (number, "sha256" in message.lower()) == (errno.EIO, True)
        assert proxy.count(path="/data/always") > 1
        assert daemon.status().index_blocks == 1
        proxy.clear()
        time.sleep(OUTAGE_MEMORY_SECONDS)
        assert read_at_last(daemon, view, "always") == right


def test_credentials_that_expire_in_mid_epoch_are_renewed_and_no_read_fails(tmp_path: Path, rclone: S3Server) -> None:
    """The server checks signatures. What renews the credentials is late: requests have been refused before."""
    contents = {f"{number:03}": random.Random(number).randbytes(1000) for number in range(100)}
    rclone.create_bucket("epoch")
    rclone.put("epoch", contents)
    credentials = tmp_path / "credentials"
    expired = b"<?xml version='1.0'?><Error><Code>ExpiredToken</Code><Message>expired</Message></Error>"

    def renew(access_key: str, secret_key: str) -> None:
        draft = tmp_path / "draft"
        draft.write_text(f"[default]\naws_access_key_id={access_key}\naws_secret_access_key={secret_key}\n")
        draft.replace(credentials)

    renew(rclone.access_key, rclone.secret_key)
    own = {name: value for name, value in rclone.environment.items() if "_KEY" not in name}
    with (
        faulty.running(rclone.endpoint) as proxy,
        Daemon(tmp_path / "node", None, {**own, "AWS_SHARED_CREDENTIALS_FILE": str(credentials)}) as daemon,
        ThreadPoolExecutor(8) as readers,
    ):
        all_reads = reads(daemon, daemon.add_dataset("d", "s3://epoch", options(proxy.endpoint)))
        reading = [readers.submit(read) for read in all_reads]
        reading[20].result()
        proxy.add(Fault(head=f"Credential={rclone.access_key}/", status=400, body=expired, times=None))
        until(lambda: daemon.status().origin_errors)
        renew(*SECOND)
        assert [one.result() for one in reading] == list(contents.values())
        assert daemon.status().errors == []


def test_a_read_waits_for_the_end_of_an_outage_which_the_log_has_once(
    daemon: Daemon, view: DatasetView, proxy: FaultyProxy, content: dict[str, bytes]
) -> None:
    before = len(daemon.log.read_text())
    proxy.add(Fault("/data/", times=None, drop=True))

    def end_once_it_is_in_the_log() -> None:
        until(lambda: "has not answered for" in daemon.log.read_text()[before:])
        proxy.clear()

    ending = threading.Thread(target=end_once_it_is_in_the_log)
    ending.start()
    assert daemon.read(view, "003") == content["003"]
    ending.join()
    said = daemon.log.read_text()[before:]
    assert (said.count("has not answered for"), said.count("answers again, after")) == (1, 1)


@pytest.mark.parametrize("read_deadline", [2])
def test_after_an_outage_that_was_too_long_reads_succeed_again(
    daemon: Daemon, view: DatasetView, proxy: FaultyProxy, content: dict[str, bytes]
) -> None:
    proxy.add(Fault("/data/", times=None, drop=True))
    failure(daemon, view, "003")
    proxy.clear()
    assert read_at_last(daemon, view, "004") == content["004"]
    time.sleep(OUTAGE_MEMORY_SECONDS)
    assert read_at_last(daemon, view, "003") == content["003"]


def test_an_object_that_changed_or_went_is_never_mixed(
    daemon: Daemon, radosgw: S3Server, content: dict[str, bytes]
) -> None:
    bucket = fill(radosgw, "daemon-changes", content)
    view = daemon.add_dataset("d", f"s3://{bucket}/data", options(radosgw.endpoint))
    first = daemon.fetch(block_ref(view, "001", 0))
    assert first[0].errno == 0
    radosgw.put(bucket, {"data/001": bytes(SIZE)})
    radosgw.delete(bucket, ["data/002"])
    for path in ("001", "002"):
        number, message = failure(daemon, view, path)
        assert number == errno.ESTALE
        assert f"data/{path}" in message
    fresh = daemon.refresh_dataset("d")
    assert fresh.dataset is not None
    assert fresh.diff is not None
    assert (fresh.diff.changed, fresh.diff.removed) == (1, 1)
    assert daemon.read(fresh.dataset, "001") == bytes(SIZE)
    assert daemon.read(fresh.dataset, "003") == content["003"]


def test_a_server_that_ignores_conditions_is_seen_through(
    tmp_path: Path, rclone: S3Server, content: dict[str, bytes]
) -> None:
    rclone.create_bucket("plain")
    rclone.put("plain", content)
    with Daemon(tmp_path / "node", QUICK, rclone.environment) as daemon:
        view = daemon.add_dataset("d", "s3://plain", options(rclone.endpoint))
        assert read_at_last(daemon, view, "000") == content["000"]
        rclone.put("plain", {"001": bytes(SIZE)})
        number, message = failure(daemon, view, "001")
        assert (number, "plain" in message) == (errno.ESTALE, True)


@pytest.mark.parametrize("read_deadline", [2])
def test_an_endpoint_that_is_gone_fails_in_time_and_what_is_cached_reads(
    daemon: Daemon, radosgw: S3Server, bucket: str, content: dict[str, bytes]
) -> None:
    with faulty.running(radosgw.endpoint) as proxy:
        view = daemon.add_dataset("d", f"s3://{bucket}/data", options(proxy.endpoint))
        assert read_at_last(daemon, view, "000") == content["000"]
    number, message = failure(daemon, view, "001")
    assert (number, proxy.endpoint in message) == (errno.EIO, True)
    assert daemon.read(view, "000") == content["000"]
    with pytest.raises(errors.OriginUnavailable, match=proxy.endpoint):
        daemon.refresh_dataset("d")
    assert daemon.report().datasets == [view]


@pytest.mark.own_daemon
def test_a_silent_endpoint_holds_up_nobody_else(
    daemon: Daemon, view: DatasetView, proxy: FaultyProxy, content: dict[str, bytes]
) -> None:
    daemon.read(view, "000")
    proxy.add(Fault("/data/001", times=None, delay=60))
    with pytest.raises(OSError, match="001") as caught:
        daemon.read(view, "001", deadline=1)
    assert caught.value.errno == errno.EIO
    assert daemon.status().in_flight_blocks == 3
    assert daemon.read(view, "000") == content["000"]
    assert daemon.read(view, "002") == content["002"]
    assert daemon.stop() == 0


@pytest.mark.own_daemon
def test_killed_in_mid_fetch_the_waiting_reader_gets_its_bytes(
    daemon: Daemon, view: DatasetView, proxy: FaultyProxy, content: dict[str, bytes]
) -> None:
    proxy.add(Fault("/data/005", times=3, delay=60))
    got: list[bytes] = []

    def read() -> None:
        deadline = time.monotonic() + 60
        while not got and time.monotonic() < deadline:
            try:
                got.append(daemon.read(view, "005"))
            except errors.DaemonUnavailable:
                time.sleep(0.05)

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: proxy.count(path="/data/005") >= 3)
    daemon.kill9()
    daemon.start()
    reader.join(60)
    assert got == [content["005"]]


@pytest.mark.own_daemon
def test_a_warm_daemon_that_was_killed_asks_the_origin_nothing(
    daemon: Daemon, view: DatasetView, proxy: FaultyProxy, content: dict[str, bytes]
) -> None:
    last = list(daemon.client.stream_responses(WARMUP, WarmupRequest(dataset="d"), timeout=60))[-1]
    assert (last.state, last.blocks) == ("done", 36)
    asked = len(proxy.requests)
    assert proxy.count(path="/data/") == 36
    daemon.kill9()
    daemon.start()
    for path, data in content.items():
        assert daemon.read(view, path) == data
    assert len(proxy.requests) == asked


def test_a_bucket_that_cannot_be_listed_is_one_clear_line(
    daemon: Daemon, radosgw: S3Server, bucket: str, tmp_path: Path
) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    for url, endpoint, kind, said in (
        ("s3://no-such-bucket/x", radosgw.endpoint, errors.NotFound, "no-such-bucket"),
        (f"s3://{bucket}/nothing/here", radosgw.endpoint, errors.NotFound, f"{bucket}/nothing/here"),
        (f"s3://{bucket}/data", nobody, errors.OriginUnavailable, nobody),
    ):
        with pytest.raises(kind, match=said) as caught:
            daemon.add_dataset("x", url, options(endpoint))
        assert len(str(caught.value).splitlines()) == 1
    stranger = {**radosgw.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}
    with Daemon(tmp_path / "other", QUICK, stranger) as other, pytest.raises(errors.OriginAccessDenied, match=bucket):
        other.add_dataset("x", f"s3://{bucket}/data", options(radosgw.endpoint))
