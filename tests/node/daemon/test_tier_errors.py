"""A tier that cannot be written to is among the errors, with the objects that fail."""

import os
import subprocess
from pathlib import Path

import pytest

from cachefs.messages import WarmupRequest
from cachefs.rpc import WARMUP
from tests.cachectl import cachectl_says
from tests.daemon import Daemon
from tests.waiting import until


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of 12 MiB: root only")
def test_a_disk_that_others_fill_is_an_error_until_there_is_room_again(tmp_path: Path) -> None:
    disk, tree = tmp_path / "disk", tmp_path / "tree"
    disk.mkdir()
    tree.mkdir()
    for number in range(40):
        (tree / f"{number:02}").write_bytes(os.urandom(250_000))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], check=True)
    try:
        settings = {
            "daemon": {"block_size": "256KiB"},
            "memory": {"budget": "2MiB", "segment_size": "1MiB"},
            "ssd": {"dir": str(disk / "ssd"), "budget": "20MiB", "segment_size": "1MiB"},
        }
        with Daemon(tmp_path / "node", settings) as daemon:
            (disk / "others").write_bytes(bytes(20 << 20))
            daemon.add_dataset("d", f"file://{tree}")
            list(daemon.client.stream_responses(WARMUP, WarmupRequest(dataset="d")))
            until(lambda: any(one.where == "ssd tier" for one in daemon.status().causes), "the full disk is not told")
            assert "ssd tier" in cachectl_says(daemon.socket, "errors")
            (disk / "others").unlink()
            until(lambda: daemon.status().tiers[1].limit > 15 << 20, "the room is not seen")
            count = sum(one.count for one in daemon.status().causes)
            list(daemon.client.stream_responses(WARMUP, WarmupRequest(dataset="d")))
            assert sum(one.count for one in daemon.status().causes) == count
    finally:
        subprocess.run(["umount", "--lazy", disk], check=False)
