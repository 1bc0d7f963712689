"""All nodes, as they say of themselves: what the service's answers are made from. It survives daemons that are silent:
what they said counts less as it gets older."""

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

# Seconds for which a node is remembered that nobody counts as a member any more.
MISSING: Final = 600.0
MOST_NODES: Final = 16384
# Bytes in a second. What is less says nothing of a link or a job, and times that come of it are no numbers.
LEAST_RATE: Final = 1.0
# Snapshots that may have come until a look at which are gone.
_MORE: Final = 64


class ClusterView:
    """Used on the event loop. Nodes have the names that schedulers give them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._names = {ours: theirs for theirs, ours in config.names.items()}  # cachefs' name -> the scheduler's
        self.nodes: dict[str, NodeState] = {}
        links = config.links
        self.cluster = Cluster(Links(origin=float(links.origin), zone=float(links.zone), region=float(links.region)))
        self.datasets = DatasetNames()
        # Are told the name of a node that has said something new, or is gone.
        self.listeners: list[Callable[[str], None]] = []
        self._peaks: dict[str, tuple[float, float]] = {}  # by zone: the most that came to one of its nodes in a second
        self._full = False
        self._learnt: set[str] = set()  # ids of snapshots that the cluster knows
        self._look_from = 0  # so many of them: time to look which are gone

    def __iter__(self) -> Iterator[NodeState]:
        return iter(list(self.nodes.values()))

    # --- who there is ----------------------------------------------------------------------------------------

    def meet(self, members: Mapping[str, Member], *, complete: bool = True) -> None:
        """These are members, by id. complete: there are no others."""
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

    # --- what they say ----------------------------------------------------------------------------------------

    def take(self, node: NodeState, report: NodeReport) -> None:
        """A node has said this. Raises ValueError where it makes no sense."""
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
        """It did not answer."""
        if node.problem != why:
            log.warning("node %s at %s:%d: %s", node.name, node.host, node.control_port, why)
        node.problem = why

    def _learn(self, snapshot: str, total: int, blocks: int, *, counted: bool) -> None:
        """A node that has nothing of a snapshot has not counted its blocks."""
        if counted or self.cluster.snapshot(snapshot) is None:
            self.cluster.put_snapshot(SnapshotFacts(snapshot, total, blocks))
            self._learnt.add(snapshot)

    def forget_unknown(self, wanted: Collection[str]) -> None:
        """Forget snapshots that no node has any more, as with each refresh of a dataset; but for those *wanted*. To be
        called from time to time: what costs is done once in a while, where some have come."""
        if len(self._learnt) < self._look_from:
            return
        there = {one for node in self.nodes.values() for one in node.snapshots}
        for snapshot in self._learnt - there - set(wanted):
            self.cluster.forget_snapshot(snapshot)
            self._learnt.discard(snapshot)
        self._look_from = len(self._learnt) + _MORE

    def _peak(self, zone: str, report: NodeReport) -> tuple[float, float]:
        """What links of nodes in this zone are known to carry. One node that was never busy says nothing of its link,
        and its neighbours have the same."""
        origin, peer = self._peaks.get(zone, (0.0, 0.0))
        load = report.load
        self._peaks[zone] = max(0.999 * origin, load.origin_rate), max(0.999 * peer, load.peer_rate)
        return self._peaks[zone]

    def _tell(self, name: str) -> None:
        for listener in self.listeners:
            listener(name)

    # --- what is asked ----------------------------------------------------------------------------------------

    def now(self) -> float:
        """The time, by which what silent nodes said counts less from now on."""
        now = time.monotonic()
        self.cluster.look(now)
        return now

    @property
    def is_complete(self) -> bool:
        """Return whether each node has been heard, or does not answer."""
        return all(one.heard is not None or one.problem or one.member_state == "away" for one in self.nodes.values())

    def age(self, name: str) -> float:
        """Seconds since the node was heard; of one that never was, since the epoch of this clock."""
        node = self.nodes.get(name)
        return time.monotonic() - (node.heard or 0.0) if node is not None else time.monotonic()

    def cachefs_name(self, name: str) -> str:
        """What the daemons call the node that schedulers call *name*."""
        return self._config.names.get(name, name)

    def rate(self, snapshot: str) -> float:
        """Bytes in a second that one rank of a running job on the snapshot reads, on average; 0: nobody knows."""
        ranks, rate = 0, 0.0
        for node in self.nodes.values():
            for job in node.report.jobs if node.report is not None else ():
                if job.snapshot == snapshot and job.rate > 0:
                    ranks, rate = ranks + job.ranks, rate + job.rate
        found = rate / ranks if ranks else 0.0
        return found if found >= LEAST_RATE else 0.0
