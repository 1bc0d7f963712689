"""Parts of large blocks, where something goes wrong between a part and the rest of its block."""

import errno
import os
import random
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.messages import OriginOptions
from tests.daemon import Daemon
from tests.mounting import mounted
from tests.servers import faulty
from tests.servers.faulty import Fault, FaultyProxy
from tests.servers.s3 import S3Server

MIB = 1 << 20
SIZE = 48 * MIB
ONE, TWO = (random.Random(seed).randbytes(SIZE) for seed in (1, 2))


@pytest.fixture
def bucket(radosgw: S3Server) -> str:
    name = f"parts{uuid.uuid4().hex[:12]}"
    radosgw.create_bucket(name)
    radosgw.put(name, {"set/large": ONE})
    return name


@pytest.fixture
def proxy(radosgw: S3Server) -> Iterator[FaultyProxy]:
    with faulty.running(radosgw.endpoint) as running:
        yield running


@pytest.fixture
def daemon(tmp_path: Path, radosgw: S3Server) -> Iterator[Daemon]:
    with Daemon(tmp_path / "node", {"prefetch": {"guess": True}}, environment=radosgw.environment) as running:
        yield running


@pytest.fixture
def large(daemon: Daemon, proxy: FaultyProxy, bucket: str, tmp_path: Path) -> Iterator[int]:
    """A descriptor of the file."""
    daemon.add_dataset("d", f"s3://{bucket}/set", OriginOptions(endpoint_url=proxy.endpoint))
    with mounted(daemon.socket, "d", tmp_path / "m") as directory:
        fd = os.open(directory / "large", os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        yield fd
        os.close(fd)


def read(fd: int, at: int, size: int = 50_000) -> int:
    """Read there; the bytes are right. Returns the errno of a failure, or 0."""
    try:
        got = os.pread(fd, size, at)
    except OSError as error:
        return error.errno or -1
    assert got
    assert got == ONE[at : at + len(got)]
    return 0


def test_of_an_object_that_is_replaced_between_a_part_and_its_rest_nothing_is_mixed(
    large: int, daemon: Daemon, proxy: FaultyProxy, radosgw: S3Server, bucket: str
) -> None:
    proxy.add(Fault(path="/set/large", delay=0.5, times=None))
    begun, replaced = threading.Event(), threading.Event()
    failed, wrong = list[int](), list[AssertionError]()

    def scattered(seed: int) -> None:
        places = random.Random(seed)
        for _ in range(8):
            try:
                failed.append(read(large, places.randrange(SIZE - 50_000)))
            except AssertionError as error:
                wrong.append(error)
            begun.set()
            assert replaced.wait(60)  # what is asked for from then on is of another object

    readers = [threading.Thread(target=scattered, args=(seed,)) for seed in range(6)]
    for one in readers:
        one.start()
    assert begun.wait(60)
    radosgw.put(bucket, {"set/large": TWO})
    replaced.set()
    for one in readers:
        one.join(120)
        assert not one.is_alive()
    proxy.clear()
    failed += [read(large, at, 128 << 10) for at in range(0, SIZE, 128 << 10)]
    assert not wrong
    assert set(failed) == {0, errno.ESTALE}
    assert "Traceback" not in daemon.log.read_text()
