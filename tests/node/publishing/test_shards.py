"""`cachefs run` publishes the shards of a WebDataset in the order in which they are opened."""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy
import pytest

from cachefs.job_messages import JobEpoch, JobPublication
from cachefs.snapshot import Snapshot
from tests.daemon import Daemon
from tests.mounting import mounted
from tests.node.publishing.said import UNANSWERED, complaints
from tests.recording import recording
from tests.warm_python import WarmPython

SCRIPT = Path(__file__).with_name("webdataset_shards.py")
CACHEFS = Path(sys.executable).with_name("cachefs")
SHARDS = 12


def write_shards(top: Path) -> None:
    for shard in range(SHARDS):
        with tarfile.open(top / f"train-{shard:03}.tar", "w") as tar:
            member = tarfile.TarInfo(f"{shard:03}.txt")
            member.size = 2
            tar.addfile(member, io.BytesIO(b"ok"))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_published_is_the_order_in_which_shards_come(
    torch_jobs: WarmPython, tmp_path: Path, workers: int
) -> None:
    top = tmp_path / "origin"
    top.mkdir()
    write_shards(top)
    with Daemon(tmp_path / "node") as daemon:
        snapshot = Snapshot(Path(daemon.add_dataset("shards", f"file://{top}").path))
        with (
            mounted(daemon.socket, "shards", tmp_path / "mnt") as mount,
            recording(daemon.client, tmp_path / "recorded") as record,
        ):
            line = [CACHEFS, "run", "--job", "stream", "--socket", tmp_path / "recorded", "--"]
            script = [sys.executable, SCRIPT]
            told = {"TOLD": str(record.notes)}
            watched = run(torch_jobs, [*line, *script, mount, workers], told)
            alone = run(torch_jobs, [*script, top, workers], {})
            published = [said for said in record.requests if isinstance(said, JobPublication)]
            orders = {said.epoch: said.order for said in record.requests if isinstance(said, JobEpoch)}
        assert published[0].map is not None
        entries = numpy.frombuffer(published[0].map.entries, "<u4")
        paths = [Path(os.fsdecode(snapshot.path(int(entry)))).name for entry in entries]
        snapshot.close()
    assert watched.stdout.replace(str(mount), str(top)) == alone.stdout
    assert complaints(watched.stderr) == []
    [line] = [line for line in watched.stderr.splitlines() if line.startswith("cachefs: loader ")]
    assert line.endswith(f": {SHARDS} shards an epoch, read ahead from epoch 1 on")
    [served] = [line for line in watched.stderr.splitlines() if "served" in line]
    assert (
        served.endswith(UNANSWERED)
        or f" of {2 * sum(path.stat().st_size for path in top.iterdir()) / 1024:.0f} KiB" in served
    )
    read = [[Path(url).name for url in json.loads(line)] for line in watched.stdout.splitlines()]
    assert len(read) == 2
    assert read[0] != read[1]
    for epoch, shards in enumerate(read):
        assert [paths[number] for number in numpy.frombuffer(orders[epoch], "<u4")] == shards


def run(torch_jobs: WarmPython, line: list[object], environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    done = torch_jobs.run(list(map(str, line)), timeout=100, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done
