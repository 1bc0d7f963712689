"""`cachectl bench` with a real daemon and a real mount: what it says, what it asks before, and what it leaves."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.mount_table import mount_points
from tests.cachectl import cachectl
from tests.daemon import Daemon, shared_daemon
from tests.waiting import until

CACHECTL = Path(sys.executable).with_name("cachectl")


@pytest.fixture
def daemon(request: pytest.FixtureRequest, running: Daemon, tmp_path: Path) -> Iterator[Daemon]:
    source = tmp_path / "source"
    for number in range(60):
        (source / f"c{number % 4}").mkdir(parents=True, exist_ok=True)
        (source / f"c{number % 4}/{number}.bin").write_bytes(os.urandom(30_000))
    with shared_daemon(request, lambda: running, lambda: Daemon(tmp_path / "node")) as daemon:
        daemon.add_dataset("tree", f"file://{source}")
        yield daemon


def command(daemon: Daemon, *arguments: str) -> list[str | Path]:
    return [CACHECTL, "bench", "tree", "--socket", daemon.socket, *arguments]


def left_behind() -> set[str]:
    directories = Path(tempfile.gettempdir()).glob("cachectl-bench-*")
    return {str(point.path) for point in mount_points() if "cachectl-bench-" in str(point.path)} | set(
        map(str, directories)
    )


def test_it_plays_a_job_and_leaves_the_node_as_it_was(daemon: Daemon) -> None:
    before = left_behind()
    arguments = ("--rate", "60", "--seconds", "1", "--batch", "8", "--workers", "2", "--yes", "--json")
    done = subprocess.run(command(daemon, *arguments), capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["samples"] == 60
    assert found["cached_before"] == 0
    assert [epoch["samples"] for epoch in found["epochs"]] == [60, 60]
    assert all(0 <= epoch["waiting"] <= 1 for epoch in found["epochs"])
    assert found["origin"]["error"] == ""
    assert [each["width"] for each in found["origin"]["throughput"]] == [1, 4, 16]
    assert found["warm"]["ratio"] > 0
    assert "first epoch" in found["verdict"][0]
    assert sum(tier.used for tier in daemon.status().tiers) == 0
    assert left_behind() <= before


def test_it_asks_before_it_reads(daemon: Daemon) -> None:
    before = daemon.status().fetched_blocks
    done = cachectl(daemon.socket, "bench", "tree")
    assert done.returncode == 1
    assert "requests; repeat with --yes" in done.stderr
    assert daemon.status().fetched_blocks == before


@pytest.mark.parametrize("arguments", [("--bytes", "1x"), ("--bytes", "1KiB")])
def test_what_cannot_be_tried_is_told_in_a_line(daemon: Daemon, arguments: tuple[str, ...]) -> None:
    done = cachectl(daemon.socket, "bench", "tree", "--yes", *arguments)
    assert done.returncode == 1
    assert "--bytes" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_job_that_cannot_read_is_told_why(daemon: Daemon, tmp_path: Path) -> None:
    for file in (tmp_path / "source").glob("*/*.bin"):
        file.unlink()
    arguments = ("--rate", "60", "--seconds", "1", "--batch", "8", "--workers", "2", "--yes")
    done = subprocess.run(command(daemon, *arguments), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "is gone since it was listed" in done.stderr
    assert "see `cachectl errors`" in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("ends", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_it_leaves_nothing(daemon: Daemon, ends: signal.Signals) -> None:
    before, read = left_behind(), daemon.status().fetched_blocks
    arguments = ("--rate", "1", "--seconds", "60", "--batch", "1", "--workers", "1", "--yes")
    with subprocess.Popen(command(daemon, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        until(lambda: running.poll() is not None or daemon.status().fetched_blocks > read)
        assert running.poll() is None
        running.send_signal(ends)
        running.send_signal(ends)  # an impatient user
        assert running.wait(120) == 130
    assert left_behind() <= before
    assert sum(tier.used for tier in daemon.status().tiers) == 0


@pytest.mark.soak
def test_killed_it_leaves_nothing_mounted(daemon: Daemon, tmp_path: Path) -> None:
    work, read = tmp_path / "work", daemon.status().fetched_blocks
    work.mkdir()
    arguments = ("--rate", "1", "--seconds", "60", "--batch", "1", "--workers", "1", "--yes")
    given = {**os.environ, "TMPDIR": str(work)}
    with subprocess.Popen(command(daemon, *arguments), stdout=subprocess.DEVNULL, env=given) as running:
        until(lambda: daemon.status().fetched_blocks > read)  # the job reads
        running.kill()
    until(lambda: not any(point.path.is_relative_to(work) for point in mount_points()))
