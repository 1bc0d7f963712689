"""Admits waiting jobs: hands out slots of cached copies in queue order."""

from collections import Counter
from collections.abc import Callable, Mapping

from cachefs.planning.scheduling.copies import (
    CachedCopy,
    JobSlots,
    SlotRequest,
    cached_copies,
    job_slots,
    order_waiting,
)
from cachefs_scheduler.duties.job_table import AdmissionState, JobTable, KnownJob
from cachefs_scheduler.view.reported_cluster import ReportedCluster

# Number of jobs that may read one copy of the job's snapshot; 0: unlimited.
JobsPerCopy = Callable[[KnownJob], int]


class AdmissionQueue:
    """Assigns slots to waiting jobs. Used on the event loop."""

    def __init__(
        self,
        view: ReportedCluster,
        jobs: JobTable,
        jobs_per_copy: JobsPerCopy,
        copies_in_progress: Callable[[str], int],
        enough: float,
    ) -> None:
        """copies_in_progress: number of copies of a snapshot that are being made. enough: the share of a snapshot that
        counts as a copy."""
        self._view = view
        self._jobs = jobs
        self._jobs_per_copy = jobs_per_copy
        self._copies_in_progress = copies_in_progress
        self._enough = enough
        self._served_at: dict[str, float] = {}  # by user with jobs: when one of the user's jobs last got a slot

    def copy_slots(self, job: KnownJob) -> JobSlots:
        """Return the slots of the copies of the job's snapshot."""
        readers = self._readers(job.snapshot, job.request.job)
        copies = cached_copies(job.snapshot, self._view.cluster, readers, self._enough)
        return job_slots(copies, self._jobs_per_copy(job), len(readers), self._copies_in_progress(job.snapshot))

    def copies(self, snapshot: str) -> tuple[CachedCopy, ...]:
        """Return the present copies of a snapshot."""
        return cached_copies(snapshot, self._view.cluster, self._readers(snapshot), self._enough)

    def admit_waiting(self, now: float) -> list[KnownJob]:
        """Admit waiting jobs for which there is a slot, update the others' places, and return the admitted jobs."""
        waiting = [one for one in self._jobs if one.state == AdmissionState.WAITING]
        if not waiting:
            self._served_at.clear()
            return []
        known_users = {one.request.user for one in self._jobs}
        self._served_at = {user: when for user, when in self._served_at.items() if user in known_users}
        running = Counter(one.request.user for one in self._jobs if one.has_slot and self._jobs_per_copy(one))
        order = order_waiting(
            [
                SlotRequest(one.request.job, one.snapshot, one.request.user, one.request.priority, one.requested_at)
                for one in waiting
            ],
            running,
            now,
            served=self._served_at,
        )
        found: list[KnownJob] = []
        positions: Counter[str] = Counter()
        known: dict[str, tuple[tuple[CachedCopy, ...], int, int]] = {}
        free_slots: dict[tuple[str, int], JobSlots] = {}
        for turn in order:
            job = self._jobs.get(turn.job)
            if job is None:
                continue
            if job.snapshot not in known:
                readers = self._readers(job.snapshot)
                copies = cached_copies(job.snapshot, self._view.cluster, readers, self._enough)
                known[job.snapshot] = copies, len(readers), self._copies_in_progress(job.snapshot)
            copies, readers_now, making = known[job.snapshot]
            # Jobs with the same snapshot and limit get the same result: compute it once for a thousand of them.
            key = job.snapshot, self._jobs_per_copy(job)
            if key not in free_slots:
                free_slots[key] = job_slots(copies, key[1], readers_now, making)
            free = free_slots[key]
            if free.free:
                known[job.snapshot] = copies, readers_now + 1, making
                free_slots = {one: kept for one, kept in free_slots.items() if one[0] != job.snapshot}
                job.state, job.queue_position, job.targets, job.admitted_at = (
                    AdmissionState.ADMITTED,
                    0,
                    free.nodes[:16],
                    now,
                )
                job.why = "a copy of the dataset has a free slot"
                self._served_at[job.request.user] = now
                found.append(job)
                continue
            positions[job.snapshot] += 1
            job.queue_position, job.targets = positions[job.snapshot], ()
            job.why = _waiting_reason(job, free)
        return found

    def _readers(self, snapshot: str, but: str = "") -> list[tuple[str, ...]]:
        """Return the nodes of each job that reads the snapshot or is about to: jobs known from schedulers, and jobs
        that only daemons report."""
        ours = [one for one in self._jobs.readers_of(snapshot) if one.has_slot and one.request.job != but]
        seen: dict[str, set[str]] = {}
        for node in self._view.cluster.jobs_on(snapshot):
            state = self._view.nodes.get(node)
            for job in state.report.jobs if state is not None and state.report is not None else ():
                if job.snapshot == snapshot:
                    seen.setdefault(job.name, set()).add(node)
        for one in (*ours, *([known] if (known := self._jobs.get(but)) is not None else [])):
            explained = next((name for name, nodes in seen.items() if nodes & set(one.nodes)), None)
            if explained is not None:
                del seen[explained]
        return [one.nodes for one in ours] + [tuple(sorted(nodes)) for nodes in _one_job_per_node(seen)]


def _one_job_per_node(seen: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the nodes of jobs that no scheduler has named, at most one job per node. Any user may publish any number
    of names through the control file of a mount, and would otherwise block all other jobs."""
    found: list[set[str]] = []
    taken: set[str] = set()
    for _, nodes in sorted(seen.items(), key=lambda one: (-len(one[1]), one[0])):
        if not nodes & taken:
            found.append(nodes)
            taken |= nodes
    return found


def _waiting_reason(job: KnownJob, found: JobSlots) -> str:
    copies = max(1, len(found.copies))
    each = found.limit // copies if copies else found.limit
    return (
        f"{found.running} jobs read {copies} {'copy' if copies == 1 else 'copies'} of {job.request.dataset}, "
        f"{each} at most each; the job is number {job.queue_position} in the queue"
    )
