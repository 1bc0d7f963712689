"""The interfaces between the service and its Kubernetes and Slurm integrations: what each offers the other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from cachefs.scheduling_messages import (
    Assignment,
    JobAdmission,
    JobAdmissions,
    JobExplanation,
    NodeEstimate,
    PlacementRequest,
    Ranking,
)

Unsubscribe = Callable[[], None]


class SchedulerIntegration(Protocol):
    """A scheduler integration, made by `open_integration(section, advice)` of `cachefs_scheduler.kube.integration`."""

    async def start(self) -> None:
        """Start, with tasks of its own. Raises CachefsError, for instance if an address is in use."""

    async def stop(self) -> None:
        """Stop all tasks. May be called without `start`."""

    def reason_not_leading(self) -> str:
        """Return why this replica sends no commands (another one leads, or none does yet); "" if this one leads."""


class AdvisorInterface(Protocol):
    """Answers schedulers: ranks nodes, admits jobs and records what schedulers did.

    Methods run on the event loop; none waits, does I/O or raises because of the cluster's state. While the cluster is
    unknown, each result says so, and the scheduler decides as it would without the service.

    Jobs are named as in cachefs.scheduling_messages. All calls are idempotent: a scheduler may retry, and the service
    may restart.
    """

    def rank(self, request: PlacementRequest, candidates: Sequence[str] | None = None) -> Ranking:
        """Score each of *candidates* for one rank of the job. Takes a few milliseconds for 5,000 nodes."""

    def assign(
        self, request: PlacementRequest, candidates: Sequence[str] | None = None, taken: Mapping[int, str] | None = None
    ) -> Assignment:
        """Choose nodes for all ranks of a gang-scheduled job.

        Args:
            request: the job.
            candidates: nodes to choose from; None: all nodes.
            taken: by rank, nodes of ranks that are placed already.
        """

    def estimate_waits(self, request: PlacementRequest, nodes: Sequence[str]) -> list[NodeEstimate]:
        """Estimate the job's I/O wait on each of a few *nodes*, in their order."""

    def admit(self, request: PlacementRequest) -> JobAdmission:
        """Return whether the job may start; queue the job otherwise. A job that waits must be asked for again within
        the configured `FORGET_SECONDS` seconds, else it loses its place in the queue."""

    def pending_admissions(self) -> JobAdmissions:
        """Return the admission of each job that has been asked for and is not placed."""

    def note_placed(self, job: str, nodes: Sequence[str], request: PlacementRequest | None = None) -> None:
        """Record the job's nodes: the job takes a slot, and the blocks that its ranks read first are prefetched there.
        *request* describes a job that the service does not know."""

    def note_resized(self, job: str, nodes: Sequence[str]) -> None:
        """Record new nodes of a placed job: its data moves to them."""

    def note_ended(self, job: str) -> None:
        """Record that the job is gone, whether it ran or not."""

    def known_jobs(self, prefix: str) -> list[str]:
        """Return the names of known jobs that have not ended and begin with *prefix*."""

    def explain(self, job: str) -> JobExplanation:
        """Explain the job's scores and queue state. Raises NotFound for a job that was never asked for, or was
        forgotten."""

    def subscribe(self, on_change: Callable[[], None]) -> Unsubscribe:
        """Call *on_change* on the event loop whenever a waiting job may start. *on_change* may call methods of this
        class."""
