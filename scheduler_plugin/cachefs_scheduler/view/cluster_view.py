"""All nodes as they report themselves: the data behind the service's answers. Reports of silent nodes count less as
they age."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

from cachefs.observe_messages import Member, NodeReport
from cachefs.planning.scheduling.cluster import Cluster
from cachefs.planning.scheduling.facts import Links, SnapshotFacts
from cachefs_scheduler.config import Config
from cachefs_scheduler.view.dataset_names import DatasetNames
from cachefs_scheduler.view.node_state import NodeState

log = logging.getLogger(__name__)

# Seconds after which a node is forgotten that no node counts as a member.
MISSING: Final = 600.0
MOST_NODES: Final = 16384
# Bytes per second. Lower rates say nothing of a link or a job, and would give infinite times.
LEAST_RATE: Final = 1.0
# New snapshots until the next search for vanished ones.
_MORE: Final = 64


class ClusterView:
    """The state of all nodes, by scheduler name. Used on the event loop."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._names = {ours: theirs for theirs, ours in config.names.items()}  # cachefs name -> scheduler name
        self.nodes: dict[str, NodeState] = {}
        links = config.links
        self.cluster = Cluster(Links(origin=float(links.origin), zone=float(links.zone), region=float(links.region)))
        self.datasets = DatasetNames()
        # Called with the name of a node that has reported, or is gone.
        self.listeners: list[Callable[[str], None]] = []
        self._peaks: dict[str, tuple[float, float]] = {}  # by zone: highest rates of a node
        self._full = False
        self._learnt: set[str] = set()  # ids of snapshots that the cluster knows
        self._look_from = 0  # number of snapshots at which to search for vanished ones

    def __iter__(self) -> Iterator[NodeState]:
        return iter(list(self.nodes.values()))

    # --- members -------------------------------------------------------------------------------------------

    def meet(self, members: Mapping[str, Member], *, complete: bool = True) -> None:
        """Record these members, by id. complete: there are no others."""
        now = time.monotonic()
        present = set()
        for member in members.values():
            name = self._names.get(member.name, member.name)
            node = self.nodes.get(name)
            if node is None:
                if len(self.nodes) >= MOST_NODES:
                    self._say_full()
                    continue
                node = self.nodes[name] = NodeState(name, member.id, member.host, member.control_port)
                log.info("node %s at %s:%d", name, member.host, member.control_port)
            node.id, node.host, node.control_port = member.id, member.host, member.control_port
            node.member_state, node.missing, node.zone = member.state, None, member.zone
            present.add(name)
        for name, node in list(self.nodes.items()) if complete else ():
            if name in present:
                continue
            node.missing = node.missing if node.missing is not None else now
            if now - node.missing > MISSING:
                self._forget(name)

    def _say_full(self) -> None:
        if not self._full:
            log.warning("there are more than %d nodes; the others are left out", MOST_NODES)
        self._full = True

    def _forget(self, name: str) -> None:
        log.info("node %s is gone", name)
        del self.nodes[name]
        self.datasets.forget(name)
        if name in self.cluster:
            self.cluster.remove(name)
        self._tell(name)

    # --- reports -------------------------------------------------------------------------------------------

    def take(self, node: NodeState, report: NodeReport) -> None:
        """Record a node's report. Raises ValueError for an invalid report."""
        now = time.monotonic()
        node.take(report, now)
        if report.zone:
            node.zone = report.zone
        if report.snapshots or report.full:
            self.datasets.follow(node.name, node.snapshots.values())
            for one in report.snapshots:
                self._learn(one.id, one.total, one.blocks, counted=bool(one.shards))
        links = self._config.links
        origin, peer = (rate if rate >= LEAST_RATE else 0.0 for rate in self._peak(node.zone, report))
        region = self._config.regions.get(node.zone, "")
        self.cluster.put(node.facts(region, links.node_origin or origin, links.node or peer), now)
        self._tell(node.name)

    def failed(self, node: NodeState, why: str) -> None:
        """Record that a node did not answer."""
        if node.problem != why:
            log.warning("node %s at %s:%d: %s", node.name, node.host, node.control_port, why)
        node.problem = why

    def _learn(self, snapshot: str, total: int, blocks: int, *, counted: bool) -> None:
        """Record a snapshot's size. A node that holds nothing of a snapshot has not counted its blocks."""
        if counted or self.cluster.snapshot(snapshot) is None:
            self.cluster.put_snapshot(SnapshotFacts(snapshot, total, blocks))
            self._learnt.add(snapshot)

    def forget_unknown(self, wanted: Collection[str]) -> None:
        """Forget snapshots that no node has, as after each refresh of a dataset, except *wanted*. Call periodically;
        the search runs only after _MORE snapshots have arrived."""
        if len(self._learnt) < self._look_from:
            return
        there = {one for node in self.nodes.values() for one in node.snapshots}
        for snapshot in self._learnt - there - set(wanted):
            self.cluster.forget_snapshot(snapshot)
            self._learnt.discard(snapshot)
        self._look_from = len(self._learnt) + _MORE

    def _peak(self, zone: str, report: NodeReport) -> tuple[float, float]:
        """Return the known link rates of nodes in this zone. They are shared, since an idle node's rate says nothing of
        its link."""
        origin, peer = self._peaks.get(zone, (0.0, 0.0))
        load = report.load
        self._peaks[zone] = max(0.999 * origin, load.origin_rate), max(0.999 * peer, load.peer_rate)
        return self._peaks[zone]

    def _tell(self, name: str) -> None:
        for listener in self.listeners:
            listener(name)

    # --- queries -------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the time, and age the reports of silent nodes."""
        now = time.monotonic()
        self.cluster.look(now)
        return now

    @property
    def is_complete(self) -> bool:
        """Return whether every node has reported, or is known not to respond."""
        return all(one.heard is not None or one.problem or one.member_state == "away" for one in self.nodes.values())

    def age(self, name: str) -> float:
        """Return the seconds since the node's last report, or since the clock's epoch if there was none."""
        node = self.nodes.get(name)
        return time.monotonic() - (node.heard or 0.0) if node is not None else time.monotonic()

    def cachefs_name(self, name: str) -> str:
        """Return the daemons' name of the node that schedulers call *name*."""
        return self._config.names.get(name, name)

    def rate(self, snapshot: str) -> float:
        """Return the average rate of one rank of running jobs on the snapshot, in bytes per second; 0: unknown."""
        ranks, rate = 0, 0.0
        for node in self.nodes.values():
            for job in node.report.jobs if node.report is not None else ():
                if job.snapshot == snapshot and job.rate > 0:
                    ranks, rate = ranks + job.ranks, rate + job.rate
        found = rate / ranks if ranks else 0.0
        return found if found >= LEAST_RATE else 0.0
