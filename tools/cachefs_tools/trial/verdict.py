"""Puts the figures of a trial into words, with advice."""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from cachefs.sizes import format_size
from cachefs_tools.origin_speed import OriginSpeed
from cachefs_tools.trial.extent import FileChoice, TrialJob
from cachefs_tools.trial.job_process import TrialEpoch
from cachefs_tools.trial.warm import WarmSpeed

# Share of waiting that is negligible, and share from which something should be changed.
NEGLIGIBLE_SHARE: Final = 0.01
LARGE_SHARE: Final = 0.05
# Warm reads through a mount below this ratio to native ones have a specific cause.
_SLOW_RATIO: Final = 0.6


class TrialFigures(msgspec.Struct, frozen=True):
    """The figures of a trial."""

    job: TrialJob
    choice: FileChoice
    origin: OriginSpeed
    epochs: Sequence[TrialEpoch]
    warm: WarmSpeed | None
    # Bytes of the whole dataset, and capacity of all tiers.
    dataset_bytes: int
    capacity: int

    @property
    def demanded_rate(self) -> float:
        """Bytes per second that the job takes."""
        return self.job.rate * self.choice.mean_size

    @property
    def origin_rate(self) -> float:
        """The origin's highest measured bytes per second."""
        return max((each.bytes for each in self.origin.throughput), default=0.0)


def verdict_sentences(found: TrialFigures) -> Iterator[str]:
    """Yield sentences, the answer first."""
    if found.epochs:
        yield _first_epoch(found)
    if len(found.epochs) > 1:
        yield _later_epochs(found)
    yield from _advice(found)


def _first_epoch(found: TrialFigures) -> str:
    share = found.epochs[0].waiting_share
    here = 1 - len(found.choice.cold_samples) / len(found.choice.samples)
    note = (
        f" ({here:.0%} of these files were on the node already, so a real first epoch waits more)" if here > 0.1 else ""
    )
    return f"A job of {found.job.rate:,.0f} samples/s {_waiting_text(share)} in its first epoch{note}."


def _later_epochs(found: TrialFigures) -> str:
    share = sum(epoch.waiting_share for epoch in found.epochs[1:]) / (len(found.epochs) - 1)
    missing = 1 - min(1.0, found.capacity / max(1, found.dataset_bytes))
    if missing <= 0:
        return f"In later epochs it {_waiting_text(share)}: the tiers hold the whole dataset."
    expected = missing * found.epochs[0].waiting_share + (1 - missing) * share
    return (
        f"In later epochs it {_waiting_text(share)} for files that are on the node. But the tiers hold "
        f"{1 - missing:.0%} of the dataset; the rest is fetched in each epoch: count with {_percent(expected)}."
    )


def _advice(found: TrialFigures) -> Iterator[str]:
    demand, origin = found.demanded_rate, found.origin_rate
    waits = bool(found.epochs) and found.epochs[0].waiting_share > LARGE_SHARE
    if found.origin.error:
        yield f"The origin failed ({found.origin.message}); see cachectl doctor."
    elif origin and origin < demand:
        yield (
            f"The origin delivers {_speed(origin)} at best, and the job needs {_speed(demand)}: the first epoch takes "
            f"at least {demand / origin:.1f} times as long. Warm the dataset up before (cachectl warmup), or start on "
            "several nodes that share what they fetch."
        )
    elif waits:
        yield (
            "The origin is quick enough, so the waits are those of a short run or of few workers: try more --workers "
            "and --seconds, and publish the order in the job (cachefs run)."
        )
    slow = [epoch for epoch in found.epochs[1:] if epoch.waiting_share > LARGE_SHARE]
    if slow and found.warm is not None:
        if found.warm.tier < demand:
            yield (
                f"One reader gets {_speed(found.warm.tier)} out of the tiers, and the job takes {_speed(demand)}: more "
                "workers, a faster SSD, or a larger memory.budget."
            )
        else:
            yield f"The tiers are quick enough ({_speed(found.warm.tier)} for one reader): give the job more workers."
    if found.capacity < found.dataset_bytes:
        yield (
            f"The dataset has {format_size(found.dataset_bytes)} and the tiers {format_size(found.capacity)}: raise "
            "ssd.budget, or use several nodes, so that later epochs need no origin."
        )
    if found.warm is not None and found.warm.ratio < _SLOW_RATIO:
        yield (
            f"Warm reads have {found.warm.ratio:.0%} of the speed of a native file: see cachectl doctor, "
            "and docs/posix.md#the-shield."
        )


def _waiting_text(share: float) -> str:
    if share < NEGLIGIBLE_SHARE:
        return "would not wait for data"
    return f"would wait for data {_percent(share)} of its time"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def _speed(count: float) -> str:
    return f"{count / 1e6:,.0f} MB/s"
