"""A node that is in no cluster has nothing of one."""

import subprocess
import sys

_PARTS = ("aiohttp", "cachefs_cluster.sharing", "cachefs_cluster.peers.client", "cachefs_cluster.membership.etcd")


def test_its_daemon_does_not_load_what_only_nodes_of_clusters_need() -> None:
    """That took 14 MB."""
    command = f"import sys, cachefs_daemon.cli; print([part for part in {_PARTS} if part in sys.modules])"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
