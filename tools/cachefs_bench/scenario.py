"""Scenarios of `cachefs-bench train`: one training job or several, and an origin of limited speed."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from cachefs.planning.eviction.policies import POLICIES
from cachefs.planning.eviction.policies.ranked import RankedPolicy
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs_bench.lab.slow_link import LinkLimits

# Seconds between the starts of two jobs on one dataset.
STAGGER_SECONDS: Final = 30.0


class JobLoader(StrEnum):
    """The reader of a job."""

    TORCH = "torch"  # a DataLoader of torch
    PLAIN = "plain"  # a loop over threads


class Publishing(StrEnum):
    """Ways in which a job publishes its sequence."""

    NONE = "none"  # not at all
    RUN = "run"  # by `cachefs run` in front of its command
    SPEC = "spec"  # by a sampler spec sent to the daemon


class SpecFault(StrEnum):
    """The error in the spec that a job publishes."""

    NONE = ""  # none
    SEED = "seed"  # another seed
    HALF = "half"  # half of the dataset
    RANGE = "range"  # samples that do not exist


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One job of a scenario."""

    seed: int = 0  # of its sampler
    start: float = 0  # seconds after the start of the first job
    batches: int = 0  # batches after which the job stops; 0: after its last epoch
    lie: SpecFault = SpecFault.NONE


@dataclass(frozen=True, slots=True)
class DatasetShape:
    """The dataset, and how each job reads it."""

    files: int = 3000
    size: int = 110_000  # bytes of each file
    epochs: int = 3
    batch_size: int = 32  # samples
    workers: int = 4
    prefetch: int = 2  # batches that each worker loads ahead
    demand: float = 150  # samples per second that the accelerator of one job takes

    @property
    def bytes(self) -> int:
        """Bytes of the whole dataset."""
        return self.files * self.size

    @property
    def demand_bytes(self) -> float:
        """Bytes per second that the accelerator of one job takes."""
        return self.demand * self.size


@dataclass(frozen=True, slots=True)
class TierShares:
    """The share of the dataset that the tiers hold."""

    capacity: float = 1.0  # share of the dataset that all tiers hold together
    memory: float = 0.5  # the memory tier's share of the capacity


@dataclass(frozen=True, slots=True)
class Scenario:
    """The configuration of one run."""

    title: str
    loader: JobLoader = JobLoader.TORCH
    publishing: Publishing = Publishing.NONE
    policy: str = "clairvoyant"  # eviction policy of the daemon
    shape: DatasetShape = field(default_factory=DatasetShape)
    tiers: TierShares = field(default_factory=TierShares)
    limits: LinkLimits = field(default_factory=LinkLimits)
    jobs: tuple[TrainingJob, ...] = (TrainingJob(),)
    keep_pages: bool = False  # the kernel keeps pages, so only the first read of a sample reaches the mount

    def real_sampler_spec(self, job: TrainingJob) -> SamplerSpec:
        """Return the order in which the job really reads."""
        kind = "torch-distributed" if self.loader == JobLoader.TORCH else "numpy"
        return SamplerSpec(kind=kind, size=self.shape.files, seed=job.seed, epochs=self.shape.epochs)


def preset_scenarios(name: str, base: Scenario) -> list[Scenario]:
    """Return the runs of a preset, all over one dataset, with the loader, latency and shape of *base* unless the preset
    says otherwise."""
    return list(_PRESETS[name](base))


def _fast_origin(base: Scenario) -> Iterator[Scenario]:
    """Yield runs against an origin that is fast enough, which show remaining waits."""
    yield from _published_and_not(base, 1.5)


def _published_and_not(base: Scenario, share: float) -> Iterator[Scenario]:
    scenario = _limit_origin(base, share)
    yield replace(scenario, title="published", publishing=best_publishing(base.loader))
    yield replace(scenario, title="not published")


def _slow_origin(base: Scenario) -> Iterator[Scenario]:
    """Yield runs against an origin that is too slow for epoch 1, which show waits of later epochs."""
    yield from _published_and_not(base, 0.5)


def _small_tiers(base: Scenario) -> Iterator[Scenario]:
    """Yield runs with tiers that hold only a part of the dataset, which show origin bytes and stalls by policy.

    The origin can deliver three quarters of the demand. From epoch 2 on this is enough for a policy that fetches no
    more than it must, in time.

    The jobs publish a spec, which has the number of epochs. The sampler of a hooked script has no end, so bytes would
    be fetched, and counted, for an epoch that never comes.
    """
    scenario = _limit_origin(base, 0.75)
    for share in (0.35, 0.5, 0.8):
        for name, policy in POLICIES.items():
            yield replace(
                scenario,
                title=f"{name} {share:.0%}",
                policy=name,
                publishing=Publishing.SPEC if issubclass(policy, RankedPolicy) else Publishing.NONE,
                tiers=replace(base.tiers, capacity=share),
            )


def _two_jobs(base: Scenario) -> Iterator[Scenario]:
    """Yield runs of two jobs that read one dataset in different orders. Half of the dataset fits into the tiers.

    A sampler adds the epoch to its seed, so with seeds 1 and 2 one job would repeat the other's orders.
    """
    jobs = (TrainingJob(seed=1), TrainingJob(seed=1001, start=STAGGER_SECONDS))
    scenario = replace(_limit_origin(base, 1.5), jobs=jobs, tiers=replace(base.tiers, capacity=0.5))
    yield replace(scenario, title="published", publishing=Publishing.SPEC)
    yield replace(scenario, title="not published")


def _wrong_sequences(base: Scenario) -> Iterator[Scenario]:
    """Yield runs of jobs that do not read what they have published."""
    plain = replace(_limit_origin(base, 1.5), loader=JobLoader.PLAIN, tiers=replace(base.tiers, capacity=0.5))
    scenario = replace(plain, publishing=Publishing.SPEC)
    shape = base.shape
    stops = shape.files // shape.batch_size // 2
    yield replace(plain, title="not published", publishing=Publishing.NONE)
    yield replace(scenario, title="right")
    yield replace(scenario, title="another seed", jobs=(TrainingJob(lie=SpecFault.SEED),))
    yield replace(scenario, title="half the dataset", jobs=(TrainingJob(lie=SpecFault.HALF),))
    yield replace(scenario, title="out of range", jobs=(TrainingJob(lie=SpecFault.RANGE),))
    yield replace(scenario, title="stops in the middle", jobs=(TrainingJob(batches=stops),))
    # Jobs do not publish their rate. This one wants ten times what the origin was made for, and waits for it.
    hasty = replace(scenario, shape=replace(shape, demand=10 * shape.demand))
    yield replace(hasty, title="ten times faster")
    yield replace(hasty, title="the same, not published", publishing=Publishing.NONE)


def _fast_reader(base: Scenario) -> Iterator[Scenario]:
    """Yield runs with an accelerator that takes ten times as many samples per second, and a dataset four times as
    large."""
    shape = replace(base.shape, files=4 * base.shape.files, demand=10 * base.shape.demand)
    yield from _published_and_not(replace(base, shape=shape), 1.5)


_PRESETS: Final = {
    "m1": _fast_origin, "m2": _slow_origin, "m3": _small_tiers, "m4": _two_jobs, "m5": _wrong_sequences,
    "fast": _fast_reader,
}  # fmt: skip
PRESETS: Final = tuple(_PRESETS)


def _limit_origin(base: Scenario, share: float) -> Scenario:
    """Return the scenario with an origin that delivers *share* times the demand of one job."""
    return replace(base, limits=replace(base.limits, bandwidth=share * base.shape.demand_bytes))


def best_publishing(loader: JobLoader) -> Publishing:
    """Return the way of publishing that takes the user of this loader the least work."""
    return Publishing.RUN if loader == JobLoader.TORCH else Publishing.SPEC
