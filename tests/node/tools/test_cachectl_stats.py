"""cachectl stats as a user runs it. The mounts report what the test says."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachefs.job_messages import JobProgress, JobPublication
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.rpc import JOB_PROGRESS, JOB_PUBLISH
from cachefs_tools.cachectl.stats import header
from tests.cachectl import CACHECTL
from tests.daemon import Daemon, shared_daemon
from tests.node.daemon.test_jobs import write_files
from tests.node.tools.test_cachectl import SMALL, failure, run

COUNTERS = {"requests": 100, "hits_memory": 50, "hits_ssd": 30, "misses": 5, "push_late": 1}
PUSHED = {"push_stored_bytes": 4_000_000, "push_held_bytes": 3 << 20, "push_budget": 64 << 20}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("node"), SMALL) as running:
        yield running


@pytest.fixture
def daemon(request: pytest.FixtureRequest, running: Daemon, tmp_path: Path) -> Iterator[Daemon]:
    write_files(tmp_path / "origin", 60, size=1000)
    with shared_daemon(request, lambda: running, lambda: Daemon(tmp_path / "node", SMALL)) as daemon:
        daemon.add_dataset("images", f"file://{tmp_path}/origin")
        daemon.report(spec="images", counters=COUNTERS)
        yield daemon


def watch(daemon: Daemon, *options: str) -> subprocess.Popen[str]:
    command = [CACHECTL, "stats", *options, "--socket", daemon.socket]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def test_lines_show_what_changed_since_the_line_before(daemon: Daemon) -> None:
    spec = SamplerSpec(kind="sequential", size=60, epochs=2)
    daemon.client.call(JOB_PUBLISH, JobPublication(job="train", dataset="images", spec=spec, lease=60))
    daemon.client.call(JOB_PROGRESS, JobProgress(job="train", consumer="0", epoch=0, position=5))
    with watch(daemon, "/mnt/test", "--json", "--interval", "0.5", "--count", "4") as process:
        quiet = line_of(process)
        more = {name: 2 * value for name, value in COUNTERS.items()}
        daemon.report(spec="images", counters={**more, **PUSHED})
        daemon.client.call(JOB_PROGRESS, JobProgress(job="train", consumer="0", epoch=0, position=45))
        busy = [line_of(process), line_of(process)]
        daemon.report(spec="images", counters={**COUNTERS, **PUSHED})
        after = line_of(process)
        assert process.wait(60) == 0
    assert (quiet["requests"], quiet["samples"], quiet["requests_per_1000_samples"]) == (0, 0, None)
    assert (quiet["held_bytes"], quiet["budget_bytes"]) == (0, 0)

    def change(name: str) -> int:
        return round(sum(line["seconds"] * line[name] for line in busy))

    assert {name: change(name) for name in ("requests", "hits_memory", "hits_ssd", "misses", "late", "wasted")} == {
        "requests": 100, "hits_memory": 50, "hits_ssd": 30, "misses": 5, "late": 1, "wasted": 0,
    }  # fmt: skip
    assert (change("pushed_bytes"), change("dropped_bytes")) == (4_000_000, 0)
    assert change("samples") == 40
    assert (busy[1]["held_bytes"], busy[1]["budget_bytes"]) == (3 << 20, 64 << 20)
    # Counters of the daemon begin at 0 again when it restarts.
    assert after["requests"] == 0


def test_text_repeats_its_header_and_fits_a_terminal(daemon: Daemon) -> None:
    daemon.report(spec="images", counters={**COUNTERS, **PUSHED})
    done = run(daemon, "stats", "test", "--interval", "0.1", "--count", "21")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 21 + 2 * 2
    heading = header(1000)
    assert [lines[at] for at in (0, 1, 22, 23)] == [*heading, *heading]
    assert {len(line) for line in lines} == {78}
    assert lines[2].split() == ["0", "-", *["0"] * 8, "3MiB", "64MiB"]


def test_a_mount_that_is_not_there_is_named(daemon: Daemon) -> None:
    assert "/mnt/other is not a live mount of this node" in failure(daemon, "stats", "/mnt/other")
    with watch(daemon, "/mnt/test", "--json", "--interval", "0.1") as process:
        line_of(process)
        daemon.report(spec="images", closing=True)
        assert process.wait(60) == 1
