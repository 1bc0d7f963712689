"""The service under measurement, as a process: the extender with TLS and the service's own advice, on made-up nodes.

    python -m cachefs_bench.extender.service NODES CERT KEY

It prints its port, and ends when its standard input ends.
"""

import asyncio
import sys
from pathlib import Path

import numpy as np

from cachefs.observe_messages import ClusterMember, NodeLoad, NodeReport, SnapshotReport
from cachefs.planning.scheduling.facts import SHARDS, WHOLE
from cachefs_bench.extender.sample_requests import DATASET, node_name
from cachefs_scheduler.config import KubeSection, ObservedClusterSection, SchedulerConfig
from cachefs_scheduler.duties.advisor import Advisor
from cachefs_scheduler.duties.job_table import JobTable
from cachefs_scheduler.duties.node_warmups import NodeWarmups
from cachefs_scheduler.duties.policies import Policies
from cachefs_scheduler.kube.integration import open_integration
from cachefs_scheduler.view.observer_client import ObserverClient
from cachefs_scheduler.view.reported_cluster import ReportedCluster

_SNAPSHOT = "5" * 32
_BYTES, _BLOCKS = 150 << 30, 1_300_000
_SEED = 7


def _fill(view: ReportedCluster, nodes: int) -> None:
    """Let all nodes report; one in ten holds a part of the dataset, with shards of its own."""
    random = np.random.default_rng(_SEED)
    names = [node_name(number) for number in range(nodes)]
    view.update_members(
        {name: ClusterMember(id=name, name=name, host="127.0.0.1", control_port=1, zone=f"z{number % 3}",
                             state="active")
         for number, name in enumerate(names)}
    )  # fmt: skip
    for number, name in enumerate(names):
        shards = np.zeros(SHARDS, np.uint8)
        if number % 10 == 0:
            shards[random.permutation(SHARDS)[: random.integers(1, SHARDS)]] = WHOLE
        cached = int(_BYTES * np.count_nonzero(shards) / SHARDS)
        report = NodeReport(
            id=name, name=name, instance="1", version=1, full=True, zone=f"z{number % 3}", state="active",
            capacity=200 << 30, used=cached, load=NodeLoad(origin_rate=2e8, peer_rate=1e9),
            snapshots=[SnapshotReport(
                id=_SNAPSHOT, total=_BYTES, blocks=_BLOCKS, datasets=[DATASET], memory=cached, shards=shards.tobytes()
            )],
        )  # fmt: skip
        view.merge_report(view.nodes[name], report)


async def _serve(nodes: int, section: KubeSection) -> None:
    config = SchedulerConfig(cluster=ObservedClusterSection(nodes=("127.0.0.1:7380",), orders=False), kube=section)
    view = ReportedCluster(config)
    _fill(view, nodes)
    warmings = NodeWarmups(view, ObserverClient(config.cluster), str)
    advisor = Advisor(view, JobTable(10_000, 900.0), Policies(config), warmings, config.queue.copy_from)
    part = open_integration(section, advisor)
    await part.start()
    print(part.server.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await part.stop()


if __name__ == "__main__":
    count, certificate, secret = sys.argv[1:]
    kube = KubeSection(listen="127.0.0.1:0", tls_cert=Path(certificate), tls_key=Path(secret), most_body=256 << 20)
    asyncio.run(_serve(int(count), kube))
