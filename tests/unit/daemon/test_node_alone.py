"""A node that is in no cluster has nothing of one."""

import subprocess
import sys
from pathlib import Path

import pytest

# Starts and stops the node of a configuration, and names what this process has imported that it should not.
_PROGRAM = """
import asyncio, sys
from pathlib import Path
from cachefsd.command import open_cluster, read_config
from cachefs_daemon.node import Node
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import PlanningParts, Storage
from cachefs_daemon.store_settings import store_config

config = read_config(Path(sys.argv[1]))
storage, threads, errors = Storage(store_config(config), PlanningParts.empty()), Threads(), ErrorLog()

async def run():
    node = Node(config, storage, threads, errors, open_cluster(config, errors))
    node.open_peer_servers(lambda link, answer: None)
    await node.start()
    await node.stop_background()
    await node.stop()

asyncio.run(run())
threads.close()
storage.close()
print([name for name in sys.modules if name.partition(".")[0] in ("aiohttp", "cachefs_cluster")])
"""

_CONFIG = """
[daemon]
socket = "{here}/s"
state_dir = "{here}/state"
[memory]
dir = "{here}/memory"
budget = "8MiB"
segment_size = "8MiB"
min_free = 0
"""


@pytest.mark.parametrize("cluster", ["", "[cluster]", '[cluster]\nmembership = "none"'])
def test_its_daemon_imports_nothing_that_only_nodes_of_clusters_need(cluster: str, tmp_path: Path) -> None:
    """That took 14 MB."""
    config = tmp_path / "c.toml"
    config.write_text(_CONFIG.format(here=tmp_path) + cluster)
    command = [sys.executable, "-c", _PROGRAM, str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
