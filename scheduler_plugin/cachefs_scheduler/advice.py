"""What the service answers to schedulers: the door between its core and the parts that talk to Kubernetes and Slurm."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from cachefs.scheduling_messages import (
    Admission,
    Admissions,
    Ask,
    Assignment,
    Explanation,
    NodeEstimate,
    Ranking,
)

Unsubscribe = Callable[[], None]


class Advice(Protocol):
    """Called on the event loop. No call waits, does I/O or raises for what a cluster may be like: with nothing known,
    the answer says so, and lets the scheduler do as it would without the service.

    Jobs have the names of cachefs.scheduling_messages. Every call may come again with the same arguments (a scheduler
    that tries again, a service that was started again), and then changes nothing.
    """

    def rank(self, ask: Ask, candidates: Sequence[str] | None = None) -> Ranking:
        """How well each of *candidates* suits one rank of the job. A few milliseconds with 5,000 of them."""

    def assign(
        self, ask: Ask, candidates: Sequence[str] | None = None, taken: Mapping[int, str] | None = None
    ) -> Assignment:
        """Nodes for all ranks of a job that starts at once (gang). taken: by rank, nodes of those that have one."""

    def estimates(self, ask: Ask, nodes: Sequence[str]) -> list[NodeEstimate]:
        """What the job would wait for on each of a few *nodes*, in their order."""

    def admit(self, ask: Ask) -> Admission:
        """May the job start? Of those that may not, the service keeps a queue. Whoever waits is to ask again once in
        a while (`FORGOTTEN` seconds in the configuration), else it loses its place."""

    def admissions(self) -> Admissions:
        """Of all jobs that were asked for and are not placed yet."""

    def placed(self, job: str, nodes: Sequence[str], ask: Ask | None = None) -> None:
        """The job has these nodes: its slots are taken, and what its ranks read first is brought there at once. Of a
        job that the service does not know, *ask* says what it reads."""

    def resized(self, job: str, nodes: Sequence[str]) -> None:
        """A job that was placed has other nodes now: its data follows."""

    def ended(self, job: str) -> None:
        """The job is no more, whether it ran or not."""

    def known(self, prefix: str) -> list[str]:
        """Names of the jobs that are known and not said to have ended, and begin with *prefix*."""

    def explain(self, job: str) -> Explanation:
        """Raises NotFound for a job that was never asked for, or long ago."""

    def subscribe(self, changed: Callable[[], None]) -> Unsubscribe:
        """Call *changed*, on the event loop, whenever a job may start that waited. It may call back."""
