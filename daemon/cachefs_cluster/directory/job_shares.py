"""Shares with other nodes the weights of jobs, and what jobs want of origins and get.

A weight is set on one node. Each node on which the job runs takes the latest one and publishes it too, so that it stays
as long as the job does. Nodes on which the job does not run use it as well: they fetch blocks for it.
"""

import asyncio
import logging
from typing import Final

from cachefs_cluster.sharing.sections import MAX_SHARED_ORIGINS, ORIGIN_USES, PRIORITIES, OriginFigures, OriginUses
from cachefs_cluster.sharing.state import SharedState
from cachefs_daemon.datasets.stamps import NO_STAMP
from cachefs_daemon.fetch.origin_shares import OriginShares, OriginUse
from cachefs_daemon.jobs.job_files import JobPriority
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.jobs.states import JobState

log = logging.getLogger(__name__)

# Seconds between two looks at what is new, and between two publications of what jobs want and get.
CHECK_SECONDS: Final = 0.5
USES_SECONDS: Final = 5.0
# A figure is published again where it has changed by this part, since every change is sent to all nodes.
_MIN_CHANGE: Final = 0.1


class SharedJobShares:
    """Publishes the weights and uses of this node's jobs, and takes those of other nodes. Used on the event loop."""

    def __init__(self, jobs: JobRegistry, shares: OriginShares, shared: SharedState) -> None:
        self._jobs = jobs
        self._shares = shares
        self._shared = shared
        self._adopted: set[str] = set()  # jobs of other nodes alone whose weights this node uses
        self._published: dict[str, dict[str, OriginFigures]] = {}  # by job

    async def run(self) -> None:
        """Share as long as the daemon runs."""
        steps = round(USES_SECONDS / CHECK_SECONDS)
        step = 0
        while True:
            try:
                self.share_weights()
                self.take_uses()
                if step % steps == 0:
                    self.publish_uses()
            except Exception:
                log.exception("the shares of jobs could not be exchanged with other nodes; trying again")
            step += 1
            await asyncio.sleep(CHECK_SECONDS)

    def share_weights(self) -> None:
        """Publish the weights of this node's jobs, and use the latest ones of all nodes."""
        latest: dict[str, JobPriority] = {}
        for values in self._shared.remote_values(PRIORITIES).values():
            for name, priority in values.items():
                latest[name] = max(latest.get(name, priority), priority, key=_order)
        running = {job.name: job for job in self._jobs if job.state == JobState.RUNNING}
        for name, job in running.items():
            if name in latest and _order(latest[name]) > _order(job.priority):
                self._jobs.set_priority(name, latest[name])
            if job.priority.change != NO_STAMP:
                self._shared.publish(PRIORITIES, name, job.priority)
        for name in self._shared.published_names(PRIORITIES):
            if name not in running:
                self._shared.remove(PRIORITIES, name)
        elsewhere = latest.keys() - running.keys()
        for name in elsewhere:
            self._jobs.weights[name] = latest[name].weight
        for name in self._adopted - elsewhere - running.keys():
            self._jobs.weights.pop(name, None)
        self._adopted = elsewhere

    def publish_uses(self) -> None:
        """Publish what jobs want of origins through this node, and get."""
        uses: dict[str, dict[str, OriginFigures]] = {}
        for origin, jobs in self._shares.local_uses.items():
            for job, use in jobs.items():
                if job:
                    own = uses.setdefault(job, {})
                    if len(own) < MAX_SHARED_ORIGINS:
                        own[origin] = (round(use.wants), round(use.gets), round(use.waits, 1))
        for name in self._published.keys() - uses.keys():
            self._shared.remove(ORIGIN_USES, name)
        self._published = {
            job: self._published[job] if _is_close(self._published.get(job), now) else now for job, now in uses.items()
        }
        for job, now in self._published.items():
            self._shared.publish(ORIGIN_USES, job, OriginUses(now))

    def take_uses(self) -> None:
        """Take what jobs want of origins through other nodes, and get."""
        remote: dict[str, dict[str, dict[str, OriginUse]]] = {}
        for node, values in self._shared.remote_values(ORIGIN_USES).items():
            for job, one in values.items():
                for origin, figures in one.origins.items():
                    remote.setdefault(node, {}).setdefault(origin, {})[job] = OriginUse(*figures)
        self._shares.take_remote_uses(remote)


def _order(priority: JobPriority) -> tuple[object, float]:
    return priority.change, priority.weight


def _is_close(before: dict[str, OriginFigures] | None, now: dict[str, OriginFigures]) -> bool:
    """Return whether the figures have hardly changed since they were published."""
    if before is None or before.keys() != now.keys():
        return False
    return all(
        abs(new - old) <= _MIN_CHANGE * max(old, new)
        for origin, figures in now.items()
        for old, new in zip(before[origin], figures, strict=True)
    )
