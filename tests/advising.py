"""An Advice whose answers tests set, and which notes what it is told."""

from collections.abc import Callable, Mapping, Sequence

from cachefs.errors import NotFound
from cachefs.scheduling_messages import (
    Admission,
    Admissions,
    Ask,
    Assignment,
    Explanation,
    NodeEstimate,
    Policy,
    Ranking,
)


class FakeAdvice:
    """Of nodes in `held`, the part of every dataset that each has is known; nothing of all others."""

    def __init__(self, held: Mapping[str, float] | None = None) -> None:
        self.held = dict(held or {})
        # Jobs that may start; None: all.
        self.go: set[str] | None = None
        # Raised by every call.
        self.broken: Exception | None = None
        self.asked: list[Ask] = []
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

    def rank(self, ask: Ask, candidates: Sequence[str] | None = None) -> Ranking:
        self._check()
        self.asked.append(ask)
        if not self.held:
            return Ranking(why="nothing is known")
        names = self.held if candidates is None else candidates
        scores = {name: self.held.get(name, 0.0) for name in names}
        refused = {}
        if ask.policy == Policy.REQUIRE and any(scores.values()):
            refused = {name: f"holds nothing of {ask.dataset}" for name, score in scores.items() if not score}
        return Ranking(scores=scores, refused=refused)

    def assign(
        self, ask: Ask, candidates: Sequence[str] | None = None, taken: Mapping[int, str] | None = None
    ) -> Assignment:
        self._check()
        self.assigned.append(dict(taken or {}))
        best = sorted(candidates or self.held, key=lambda name: (-self.held.get(name, 0.0), name))
        free = [name for name in best if name not in (taken or {}).values()] or best
        nodes = [(taken or {}).get(rank, "") for rank in range(ask.ranks)]
        rest = iter(free * ask.ranks)
        return Assignment(nodes=[node or next(rest) for node in nodes])

    def estimates(self, ask: Ask, nodes: Sequence[str]) -> list[NodeEstimate]:
        return []

    def admit(self, ask: Ask) -> Admission:
        self._check()
        self.told.append(("admit", ask.job))
        if self.go is None or ask.job in self.go:
            return Admission(job=ask.job, go=True, why="a copy has a slot")
        return Admission(job=ask.job, go=False, why="both slots of its copy are taken", place=1)

    def admissions(self) -> Admissions:
        return Admissions(version=1)

    def placed(self, job: str, nodes: Sequence[str], ask: Ask | None = None) -> None:
        self.told.append(("placed", job, tuple(nodes)))

    def resized(self, job: str, nodes: Sequence[str]) -> None:
        self.told.append(("resized", job, tuple(nodes)))

    def ended(self, job: str) -> None:
        self.told.append(("ended", job))

    def known(self, prefix: str) -> list[str]:
        return [job for job in self.remembered if job.startswith(prefix)]

    def explain(self, job: str) -> Explanation:
        raise NotFound(job)

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(changed)
        return lambda: self._listeners.remove(changed)
