"""What `cachefs-bench train` runs: a job, or several, in front of an origin that is as slow as it is told."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from cachefs_tools.bench.link import Limits

POLICIES: Final = ("clairvoyant", "alsd", "minio", "lru", "lfu", "fifo", "refcount")
# How a job says what it will read: not at all; through `cachefs run` in front of it; as a sampler spec, by RPC.
PUBLISHING: Final = ("none", "run", "spec")
# What a job that publishes a spec says, where that is not the truth.
LIES: Final = ("seed", "half", "range")
# Seconds between the starts of two jobs on one dataset.
STAGGER: Final = 30.0


@dataclass(frozen=True, slots=True)
class Job:
    """seed: of its sampler; start: seconds after the first job; batches: it stops after so many (0: never); lie: one of
    LIES, or empty."""

    seed: int = 0
    start: float = 0
    batches: int = 0
    lie: str = ""


@dataclass(frozen=True, slots=True)
class Shape:
    """The dataset and how it is read. size: bytes of each file; demand: samples per second that one job's accelerator
    takes; prefetch: batches ahead per worker."""

    files: int = 3000
    size: int = 110_000
    epochs: int = 3
    batch_size: int = 32
    workers: int = 4
    prefetch: int = 2
    demand: float = 150

    @property
    def bytes(self) -> int:
        return self.files * self.size

    @property
    def demand_bytes(self) -> float:
        """Per second."""
        return self.demand * self.size


@dataclass(frozen=True, slots=True)
class Tiers:
    """capacity: share of the dataset that all tiers hold together; memory: the memory tier's part of that."""

    capacity: float = 1.0
    memory: float = 0.5


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run. loader: `torch` or `plain`; keep_pages: let the kernel keep what was read, so that only first reads
    reach the mount."""

    title: str
    loader: str = "torch"
    publishing: str = "none"
    policy: str = "clairvoyant"
    shape: Shape = field(default_factory=Shape)
    tiers: Tiers = field(default_factory=Tiers)
    limits: Limits = field(default_factory=Limits)
    jobs: tuple[Job, ...] = (Job(),)
    keep_pages: bool = False


def preset(name: str, base: Scenario) -> list[Scenario]:
    """The runs that show one thing, for the shape, loader and latency of *base*."""
    return list(_PRESETS[name](base))


def _fast_origin(base: Scenario) -> Iterator[Scenario]:
    """The origin could keep up: does anything still wait for it?"""
    scenario = _limited(base, 1.5)
    yield replace(scenario, title="published", publishing=_way(base))
    yield replace(scenario, title="not published")


def _slow_origin(base: Scenario) -> Iterator[Scenario]:
    """Epoch 1 can be no faster than the origin; do the later ones wait for anything?"""
    scenario = _limited(base, 0.5)
    yield replace(scenario, title="published", publishing=_way(base))
    yield replace(scenario, title="not published")


def _small_tiers(base: Scenario) -> Iterator[Scenario]:
    """The tiers hold a part only: origin bytes and stalls by policy. The origin can do three quarters of the demand:
    enough from epoch 2 on for who fetches no more than must be, and in time.

    The jobs publish a spec, which says how many epochs there are: a hooked script's sampler goes on for ever, and the
    bytes fetched for an epoch that never comes would count."""
    scenario = _limited(base, 0.75)
    for share in (0.35, 0.5, 0.8):
        for policy in ("clairvoyant", "alsd", "minio", "lru"):
            knows = policy in ("clairvoyant", "alsd")
            yield replace(
                scenario, title=f"{policy} {share:.0%}", policy=policy, publishing="spec" if knows else "none",
                tiers=replace(base.tiers, capacity=share),
            )  # fmt: skip


def _two_jobs(base: Scenario) -> Iterator[Scenario]:
    """Two orders over one dataset, half of which fits."""
    jobs = (Job(seed=1), Job(seed=2, start=STAGGER))
    scenario = replace(_limited(base, 1.5), jobs=jobs, tiers=replace(base.tiers, capacity=0.5))
    yield replace(scenario, title="published", publishing="spec")
    yield replace(scenario, title="not published")


def _wrong_sequences(base: Scenario) -> Iterator[Scenario]:
    """What jobs say is not what they do."""
    scenario = replace(_limited(base, 1.5), loader="plain", publishing="spec", tiers=replace(base.tiers, capacity=0.5))
    shape = base.shape
    stops = shape.files // shape.batch_size // 2
    yield replace(scenario, title="not published", publishing="none")
    yield replace(scenario, title="right")
    yield replace(scenario, title="another seed", jobs=(Job(lie="seed"),))
    yield replace(scenario, title="half the dataset", jobs=(Job(lie="half"),))
    yield replace(scenario, title="out of range", jobs=(Job(lie="range"),))
    yield replace(scenario, title="stops in the middle", jobs=(Job(batches=stops),))
    # Nobody says how fast a job reads; one that would take ten times what the origin was made for waits for it.
    hasty = replace(scenario, shape=replace(shape, demand=10 * shape.demand))
    yield replace(hasty, title="ten times faster")
    yield replace(hasty, title="the same, not published", publishing="none")


_PRESETS: Final = {
    "m1": _fast_origin, "m2": _slow_origin, "m3": _small_tiers, "m4": _two_jobs, "m5": _wrong_sequences,
}  # fmt: skip
PRESETS: Final = tuple(_PRESETS)


def _limited(base: Scenario, share: float) -> Scenario:
    """With an origin of *share* times one job's demand."""
    return replace(base, limits=replace(base.limits, bandwidth=share * base.shape.demand_bytes))


def _way(base: Scenario) -> str:
    return "run" if base.loader == "torch" else "spec"
