"""What the parts of a node are told of other nodes where there are none."""

import asyncio
import socket

import pytest

from cachefs.errors import ConfigError
from cachefs.messages import ClusterBrief, PeerCounts
from cachefs_daemon.datasets.stamps import NO_STAMP
from cachefs_daemon.node_cluster import NO_CLUSTER
from cachefs_daemon.ports import LOCAL_DIRECTORY, LOCAL_PLACEMENT


def test_the_status_names_no_cluster() -> None:
    status = asyncio.run(NO_CLUSTER.full_status())
    assert (status.name, status.source, status.me, status.members, status.remarks) == ("", "none", "", [], [])
    assert 0 <= status.age < 3600
    assert NO_CLUSTER.brief() == ClusterBrief()
    assert NO_CLUSTER.peer_counts() == PeerCounts()
    assert NO_CLUSTER.name == socket.gethostname()
    assert not list(NO_CLUSTER.away_nodes(0.0))


def test_a_node_alone_knows_of_no_other_jobs_and_cannot_be_drained() -> None:
    assert asyncio.run(NO_CLUSTER.scale_inputs()) is None
    with pytest.raises(ConfigError, match="in no cluster"):
        asyncio.run(NO_CLUSTER.drain("", undo=False))


def test_all_datasets_and_blocks_are_the_nodes_own() -> None:
    assert LOCAL_DIRECTORY.stamp() == NO_STAMP
    assert not list(LOCAL_DIRECTORY.additions_elsewhere())
    assert not list(LOCAL_DIRECTORY.stamps_elsewhere("d"))
    assert not LOCAL_DIRECTORY.is_used("s")
    assert not LOCAL_DIRECTORY.keep_if_read("s")
    assert not LOCAL_DIRECTORY.outdated_mounts("d", "s")
    LOCAL_DIRECTORY.check_not_mounted_elsewhere("d")
    assert LOCAL_PLACEMENT.first_rate == 0
    assert not LOCAL_PLACEMENT.margins()
    assert not LOCAL_PLACEMENT.used_snapshots()
