"""A node whose tiers are full is killed: what it held, it still holds, and what was damaged meanwhile is found."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.messages import OriginOptions, Selection
from cachefs.rpc import CACHED
from tests.daemon import Daemon
from tests.mounting import drop_pages, mounted
from tests.servers import faulty
from tests.servers.faulty import FaultyProxy
from tests.servers.s3 import S3Server

FILES, SIZE = 300, 110_000
SETTINGS = {
    "daemon": {"block_size": "512KiB"},
    "memory": {"budget": "8MiB", "segment_size": "1MiB"},
    "ssd": {"budget": "20MiB", "segment_size": "2MiB"},
}


@pytest.fixture
def content() -> dict[str, bytes]:
    rng = random.Random(11)
    return {f"{number % 9}/{number:04}.jpg": rng.randbytes(SIZE) for number in range(FILES)}


@pytest.fixture
def proxy(radosgw: S3Server, content: dict[str, bytes]) -> Iterator[FaultyProxy]:
    radosgw.create_bucket("restart")
    radosgw.put("restart", content)
    with faulty.running(radosgw.endpoint) as running:
        yield running


def test_a_killed_daemon_serves_full_tiers_without_the_origin_and_repairs_damage(
    radosgw: S3Server, proxy: FaultyProxy, content: dict[str, bytes], tmp_path: Path
) -> None:
    options = OriginOptions(endpoint_url=proxy.endpoint, addressing_style="path")
    with Daemon(tmp_path / "node", SETTINGS, radosgw.environment) as daemon:
        daemon.add_dataset("images", "s3://restart", options)
        with mounted(daemon.socket, "images", tmp_path / "mnt") as mount:
            for name, expected in content.items():
                assert (mount / name).read_bytes() == expected
            daemon.kill9()
            daemon.start()
            kept = cached_files(daemon)
            assert len(kept) * SIZE > 20 << 20
            asked = len(proxy.requests)
            drop_pages(mount)
            for name in kept:
                assert (mount / name).read_bytes() == content[name]
            assert len(proxy.requests) == asked
            assert daemon.status().repairs == 0

            flip_bytes([*daemon.memory.glob("*.seg"), *daemon.ssd.glob("*.seg")], count=100)
            drop_pages(mount)
            for name in kept:
                assert (mount / name).read_bytes() == content[name]
            # Some flips hit the slack between records and what is not cached any more.
            assert 30 <= daemon.status().repairs <= 100
            assert len(proxy.requests) > asked


def cached_files(daemon: Daemon) -> list[str]:
    pages = daemon.client.stream_responses(CACHED, Selection(dataset="images"))
    return [os.fsdecode(file.path) for page in pages for file in page.files if sum(file.cached) == file.size]


def flip_bytes(segments: list[Path], count: int) -> None:
    rng = random.Random(12)
    filled = [path for path in segments if path.stat().st_blocks]
    for _ in range(count):
        path = rng.choice(filled)
        with path.open("r+b") as file:
            place = rng.randrange(path.stat().st_blocks * 512)  # the rest is a hole
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 0xFF]))
