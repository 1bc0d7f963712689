"""Follows all daemons: discovers them through any of them, and keeps a long poll open to each."""

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Final

from cachefs.observe_messages import ClusterMember, ClusterMembers
from cachefs_scheduler.view.observer_client import NodeRequestFailed, ObserverClient
from cachefs_scheduler.view.reported_cluster import ReportedCluster, ReportedNode

log = logging.getLogger(__name__)

# Seconds between membership queries, and duration of a long poll.
MEMBERS_SECONDS: Final = 10.0
WAIT_SECONDS: Final = 25.0
# Reports accepted per second from all nodes together: each takes a millisecond.
REPORTS_PER_SECOND: Final = 200
# Seconds between attempts to reach a silent node.
FIRST_RETRY: Final = 1.0
LAST_RETRY: Final = 30.0


class DaemonFollower:
    """Polls members and their reports. Used on the event loop."""

    def __init__(self, view: ReportedCluster, client: ObserverClient, seeds: Sequence[tuple[str, int]]) -> None:
        """seeds: hosts and control ports of the first daemons."""
        self._view = view
        self._client = client
        self._seeds = list(seeds)
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by name of the node
        self._has_warned_silent = False
        self._warned_clusters = 0

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            while True:
                await self._query_members()
                await asyncio.sleep(MEMBERS_SECONDS if self._view.nodes else FIRST_RETRY)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _query_members(self) -> None:
        """Query the membership. Silent daemons do not delay the others: nodes are recorded as answers arrive."""
        reporting = [node for node in self._view if not node.problem and node.report is not None]
        addresses = [
            *self._seeds,
            *((node.host, node.control_port) for node in random.sample(reporting, min(3, len(reporting)))),
        ]
        tasks = [asyncio.create_task(self._members_of(*where)) for where in dict.fromkeys(addresses)]
        members: dict[str, ClusterMember] = {}
        clusters: list[set[str]] = []
        problems = []
        try:
            for response in asyncio.as_completed(tasks):
                try:
                    membership = await response
                except NodeRequestFailed as error:
                    problems.append(str(error))
                    continue
                for member in membership.members:
                    if member.id not in members or members[member.id].state == "away":
                        members[member.id] = member
                _merge_clusters(clusters, {member.id for member in membership.members})
                self._view.update_members(members, complete=False)
                self._follow_all()
        finally:
            for task in tasks:
                task.cancel()
        self._log_problems(members, clusters, problems)
        if members:
            self._view.update_members(members, complete=True)
        self._follow_all()

    async def _members_of(self, host: str, port: int) -> ClusterMembers:
        try:
            return await self._client.fetch_members(host, port)
        except NodeRequestFailed as error:
            raise NodeRequestFailed(f"{host}:{port - 1}: {error}") from None  # the port as in cluster.nodes

    def _log_problems(
        self, members: Mapping[str, ClusterMember], clusters: Sequence[set[str]], problems: Sequence[str]
    ) -> None:
        """Log suspicious memberships, once."""
        if not members and not self._has_warned_silent:
            log.warning("no daemon answers the query for members: %s", "; ".join(dict.fromkeys(problems))[:500])
        if len(clusters) > 1 and self._warned_clusters != len(clusters):
            log.warning(
                "the daemons belong to %d clusters, which share no blocks, but estimates treat them as one; "
                "run a cachefs-scheduler for each cluster", len(clusters),
            )  # fmt: skip
        self._has_warned_silent, self._warned_clusters = not members, len(clusters)

    def _follow_all(self) -> None:
        known = {node.name: node for node in self._view}
        for name in self._tasks.keys() - known.keys():
            self._tasks.pop(name).cancel()
        for name, node in known.items():
            task = self._tasks.get(name)
            if task is None or task.done():
                self._tasks[name] = asyncio.create_task(self._follow(node), name=f"follow {name}")

    async def _follow(self, node: ReportedNode) -> None:
        pause = max(1.0, len(self._view.nodes) / REPORTS_PER_SECOND)
        await asyncio.sleep(random.uniform(0, pause - 1))
        retry = FIRST_RETRY
        while True:
            pause = max(1.0, len(self._view.nodes) / REPORTS_PER_SECOND)
            try:
                known = node.report if node.reported_at is not None and not node.problem else None
                report = await self._client.fetch_report(node.host, node.control_port, known, WAIT_SECONDS, pause)
                if report.id and node.id and report.id != node.id:
                    raise NodeRequestFailed(f"node {report.id[:32]} answers at its address, not {node.id}")
                self._view.merge_report(node, report)
                retry = FIRST_RETRY
            except (NodeRequestFailed, ValueError) as error:
                self._view.note_failure(node, str(error))
                await asyncio.sleep(retry * random.uniform(0.7, 1.0))
                retry = min(2 * retry, LAST_RETRY)


def _merge_clusters(clusters: list[set[str]], members: set[str]) -> None:
    """Merge the clusters that share any of *members* with them."""
    joined = [one for one in clusters if one & members]
    for one in joined:
        clusters.remove(one)
    clusters.append(members.union(*joined))
