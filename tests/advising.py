"""An Advice whose answers tests set, and which notes what it is told."""

from collections.abc import Callable, Mapping, Sequence

from cachefs.errors import NotFound
from cachefs.scheduling_messages import (
    Assignment,
    JobAdmission,
    JobAdmissions,
    JobExplanation,
    NodeEstimate,
    PlacementPolicy,
    PlacementRequest,
    Ranking,
)


class FakeAdvisor:
    """Of nodes in `held`, the part of every dataset that each has is known; nothing of all others."""

    def __init__(self, held: Mapping[str, float] | None = None) -> None:
        self.held = dict(held or {})
        # Jobs that may start; None: all.
        self.go: set[str] | None = None
        # Raised by every call.
        self.broken: Exception | None = None
        self.asked: list[PlacementRequest] = []
        # Jobs that are known from before.
        self.remembered: list[str] = []
        self.assigned: list[dict[int, str]] = []
        # What it was told: ("placed", job, nodes), ("resized", job, nodes), ("ended", job), ("admit", job).
        self.told: list[tuple[object, ...]] = []
        self._listeners: list[Callable[[], None]] = []

    def let(self, *jobs: str) -> None:
        """These may start from now on, and whoever listens is told."""
        self.go = (self.go or set()) | set(jobs)
        for listener in list(self._listeners):
            listener()

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken

    # --- as Advice ---------------------------------------------------------------------------------------------------

    def rank(self, request: PlacementRequest, candidates: Sequence[str] | None = None) -> Ranking:
        self._check()
        self.asked.append(request)
        if not self.held:
            return Ranking(why="nothing is known")
        names = self.held if candidates is None else candidates
        scores = {name: self.held.get(name, 0.0) for name in names}
        refused = {}
        if request.policy == PlacementPolicy.REQUIRE and any(scores.values()):
            refused = {name: f"holds nothing of {request.dataset}" for name, score in scores.items() if not score}
        return Ranking(scores=scores, refused=refused)

    def assign(
        self, request: PlacementRequest, candidates: Sequence[str] | None = None, taken: Mapping[int, str] | None = None
    ) -> Assignment:
        self._check()
        self.assigned.append(dict(taken or {}))
        best = sorted(candidates or self.held, key=lambda name: (-self.held.get(name, 0.0), name))
        free = [name for name in best if name not in (taken or {}).values()] or best
        nodes = [(taken or {}).get(rank, "") for rank in range(request.ranks)]
        rest = iter(free * request.ranks)
        return Assignment(nodes=[node or next(rest) for node in nodes])

    def estimate_waits(self, request: PlacementRequest, nodes: Sequence[str]) -> list[NodeEstimate]:
        return []

    def admit(self, request: PlacementRequest) -> JobAdmission:
        self._check()
        self.told.append(("admit", request.job))
        if self.go is None or request.job in self.go:
            return JobAdmission(job=request.job, go=True, why="a copy has a slot")
        return JobAdmission(job=request.job, go=False, why="both slots of its copy are taken", place=1)

    def pending_admissions(self) -> JobAdmissions:
        return JobAdmissions(version=1)

    def note_placed(self, job: str, nodes: Sequence[str], request: PlacementRequest | None = None) -> None:
        self.told.append(("placed", job, tuple(nodes)))

    def note_resized(self, job: str, nodes: Sequence[str]) -> None:
        self.told.append(("resized", job, tuple(nodes)))

    def note_ended(self, job: str) -> None:
        self.told.append(("ended", job))

    def known_jobs(self, prefix: str) -> list[str]:
        return [job for job in self.remembered if job.startswith(prefix)]

    def explain(self, job: str) -> JobExplanation:
        raise NotFound(job)

    def subscribe(self, on_change: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(on_change)
        return lambda: self._listeners.remove(on_change)
