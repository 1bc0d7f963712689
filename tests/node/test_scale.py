"""Whole trees through the whole system, small with every run of the suite and at full size by `make soak`."""

import contextlib
import multiprocessing
import os
import random
import subprocess
import threading
import time
from pathlib import Path

import pytest

from cachefs.messages import OriginOptions
from cachefs_bench.hotread import HotRead, compile_hotread
from tests.daemon import Daemon
from tests.mounting import drop_pages, mounted
from tests.scale import FULL_MARKS, SCALES, Scale, mixed_files, write_tree
from tests.servers.s3 import S3Server

BUCKET = "scale"


@pytest.fixture(scope="module", params=SCALES)
def scale(request: pytest.FixtureRequest) -> Scale:
    chosen: Scale = request.param
    return chosen


@pytest.fixture(scope="module")
def tree(scale: Scale, tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("tree")
    write_tree(top, scale)
    return top


@pytest.fixture(scope="module")
def hotread(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> HotRead:
    names = subprocess.run(["find", ".", "-type", "f", "-printf", "%P\\n"], cwd=tree, capture_output=True, check=True)
    return compile_hotread(tmp_path_factory.mktemp("hotread"), names.stdout.decode().splitlines())


def checksum(hotread: HotRead, root: Path, files: int) -> str:
    (line,) = hotread.run(root, procs=2, checksum=True)
    assert line["files"] == files
    assert line["errors"] == 0
    found: str = line["sum"]
    return found


def test_a_tree_behind_s3_reads_back_byte_for_byte_whatever_happens(
    radosgw: S3Server, scale: Scale, tree: Path, hotread: HotRead, tmp_path: Path
) -> None:
    prefix = f"tree-{scale.files}"
    radosgw.create_bucket(BUCKET)
    radosgw.put(BUCKET, {f"{prefix}/{name}": content for name, content in mixed_files(scale)})
    expected = checksum(hotread, tree, scale.files)
    options = OriginOptions(endpoint_url=radosgw.endpoint, addressing_style="path")
    size = sum(len(content) for _, content in mixed_files(scale))
    tiers = {"memory": {"budget": max(64 << 20, size // 3)}, "ssd": {"budget": 2 * size + (64 << 20)}}
    with Daemon(tmp_path / "node", tiers, radosgw.environment) as daemon:
        view = daemon.add_dataset("tree", f"s3://{BUCKET}/{prefix}", options)
        assert (view.files, view.bytes, view.problems) == (scale.files, size, 0)
        with mounted(daemon.socket, "tree", tmp_path / "mnt") as mount:
            assert checksum(hotread, mount, scale.files) == expected, "cold"
            assert checksum(hotread, mount, scale.files) == expected, "warm in the kernel"
            drop_pages(mount)
            assert checksum(hotread, mount, scale.files) == expected, "warm in the tiers"
            daemon.kill9()
            daemon.start()
            drop_pages(mount)
            assert checksum(hotread, mount, scale.files) == expected, "after kill -9 of the daemon"
            assert daemon.status().fetched_blocks == 0
        daemon.stop()
        daemon.start()
        with mounted(daemon.socket, "tree", tmp_path / "mnt") as mount:
            assert checksum(hotread, mount, scale.files) == expected, "after both processes restarted"
        assert daemon.status().fetched_blocks == 0


@pytest.fixture(params=[pytest.param(32, id="small"), pytest.param(1, id="full", marks=FULL_MARKS)])
def divisor(request: pytest.FixtureRequest) -> int:
    """Of tiers of 256 MiB and 1 GiB, a dataset of 4 GiB and segments of 16 MiB, which have 1 MiB at least."""
    chosen: int = request.param
    return chosen


@pytest.fixture
def images(divisor: int, tmp_path: Path) -> Path:
    top = tmp_path / "images"
    rng = random.Random(8)
    content = rng.randbytes(1 << 20)
    for number in range((4 << 30) // divisor // 220_000):
        directory = top / f"{number % 50:02}"
        directory.mkdir(parents=True, exist_ok=True)
        start = rng.randrange(600_000)
        (directory / f"{number:06}").write_bytes(content[start : start + rng.randrange(100_000, 340_000)])
    return top


# A tier whose policy is lru evicts with each read.
@pytest.mark.parametrize("policy", [pytest.param("minio", marks=pytest.mark.soak), "lru"])
def test_budgets_hold_under_eight_readers(images: Path, divisor: int, policy: str, tmp_path: Path) -> None:
    segment = max((16 << 20) // divisor, 1 << 20)
    budgets = {"memory": (256 << 20) // divisor, "ssd": (1 << 30) // divisor}
    settings = {name: {"budget": budget, "segment_size": segment} for name, budget in budgets.items()}
    daemon_settings = {"policy": policy, "block_size": "512KiB"}
    with Daemon(tmp_path / "node", {"daemon": daemon_settings, **settings}) as daemon:
        daemon.add_dataset("images", f"file://{images}")
        directories = {"memory": daemon.memory, "ssd": daemon.ssd}
        with (
            mounted(daemon.socket, "images", tmp_path / "mnt") as mount,
            DiskUsage(directories) as usage,
            multiprocessing.get_context("fork").Pool(8) as readers,
        ):
            checks = readers.starmap(read_twice, [(images, mount, seed) for seed in range(8)])
        assert all(checks)
        assert usage.samples > 3
        for name, budget in budgets.items():
            assert usage.highest[name] <= budget + segment
            assert usage.highest[name] > budget // 2
        assert daemon.status().errors == []


def read_twice(source: Path, mount: Path, seed: int) -> bool:
    """An eighth of the files, twice, in random order, with the kernel's pages dropped; True where all was right."""
    names = sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())[seed::8]
    rng = random.Random(seed)
    right = True
    for _ in range(2):
        rng.shuffle(names)
        for name in names:
            with (mount / name).open("rb") as file:
                right &= file.read() == (source / name).read_bytes()
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return right


class DiskUsage:
    """What `du` would say of some directories, over and over. highest: the most seen of each, in bytes."""

    def __init__(self, directories: dict[str, Path]) -> None:
        self.highest = dict.fromkeys(directories, 0)
        self.samples = 0
        self._directories = directories
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "DiskUsage":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            for name, directory in self._directories.items():
                self.highest[name] = max(self.highest[name], disk_usage(directory))
            self.samples += 1
            time.sleep(0.02)


def disk_usage(directory: Path) -> int:
    total = directory.stat().st_blocks
    for entry in os.scandir(directory):
        # A segment may be unlinked under us.
        with contextlib.suppress(FileNotFoundError):
            total += entry.stat().st_blocks
    return total * 512
