"""Computes a job's progress, its remaining time, and the share of its time that it has waited for data.

A job has loaders: all consumers of its ranks that read by one line of the program, or one consumer without a known
loader. Figures of a loader are those of its slowest rank, except rates and waiting times, which are sums over the
ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cachefs.job_messages import ConsumerView, JobView, OriginShare
from cachefs.publishing.waiting import WaitTimes, explain_wait
from cachefs.sizes import format_size

# States of jobs and consumers in the daemon's messages.
RUNNING: Final = "running"
ENDED: Final = "ended"
LEARNING: Final = "learning"


@dataclass(frozen=True, slots=True)
class LoaderProgress:
    """The consumers of a job that read by one loader, one or more of each rank."""

    name: str
    consumers: Sequence[ConsumerView]

    @property
    def slowest(self) -> ConsumerView:
        """The consumer that is behind all others, of those that have not ended, if there are any."""
        left = [consumer for consumer in self.consumers if consumer.state != ENDED] or self.consumers
        return min(left, key=lambda one: (current_epoch_of(one), done_share_of(one) or 0.0))

    @property
    def ranks(self) -> int:
        return len({consumer.rank for consumer in self.consumers})

    @property
    def state(self) -> str:
        """The state of the slowest consumer, unless another consumer has a problem."""
        states = [consumer.state for consumer in self.consumers]
        return next((bad for bad in ("not followed", "standing still", LEARNING) if bad in states), self.slowest.state)

    @property
    def epoch(self) -> int:
        """The epoch of the slowest consumer, counted from 1."""
        return current_epoch_of(self.slowest)

    @property
    def epochs(self) -> int:
        """The number of all epochs; 0 where unknown."""
        return planned_epochs_of(self.slowest)

    @property
    def done_share(self) -> float | None:
        """The part of its epoch that the slowest consumer has read, from 0 to 1; None where unknown."""
        return done_share_of(self.slowest)

    @property
    def rate(self) -> float:
        """Samples per second of all ranks."""
        return sum(map(rate_of, self.consumers))

    @property
    def epoch_seconds_left(self) -> float | None:
        """Seconds until the slowest consumer ends its epoch, at the rate of this epoch; None where unknown."""
        return epoch_seconds_left_of(self.slowest)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the slowest consumer ends all its epochs; None where unknown."""
        one = self.slowest
        left, duration = epoch_seconds_left_of(one), epoch_duration_of(one)
        epochs = planned_epochs_of(one) - current_epoch_of(one)
        return None if left is None or duration is None or epochs < 0 else left + epochs * duration

    @property
    def wait_times(self) -> WaitTimes:
        """The time that the loop has waited for the loader, in all ranks."""
        views = [consumer.loader for consumer in self.consumers if consumer.loader is not None]
        stalled: dict[str, float] = {}
        for consumer in self.consumers:
            for kind, seconds in consumer.stalled.items():
                stalled[kind] = stalled.get(kind, 0.0) + seconds
        return WaitTimes(
            busy=sum(view.busy for view in views),
            waited=sum(view.waited for view in views),
            first_busy=sum(view.first_busy for view in views),
            first_waited=sum(view.first_waited for view in views),
            workers=max((view.workers for view in views), default=0),
            processes=max(1, self.ranks),
            stalled=stalled,
            is_learning=any(consumer.state == LEARNING for consumer in self.consumers),
            was_learned=any(view.was_learned for view in views),
            is_unknown=any(consumer.note for consumer in self.consumers),
        )


def group_by_loader(consumers: Iterable[ConsumerView]) -> list[LoaderProgress]:
    """Return the loaders of a job with these consumers, in order of appearance."""
    named: dict[str, list[ConsumerView]] = {}
    for one in consumers:
        named.setdefault(one.loader.name if one.loader is not None else one.consumer, []).append(one)
    return [LoaderProgress(name, of_one) for name, of_one in named.items()]


def ranks_of_job(view: JobView) -> int:
    return len({consumer.rank for consumer in view.consumers})


def waited_share(loaders: Iterable[LoaderProgress]) -> float | None:
    """Return the part of its time that the job has waited for data, from 0 to 1; None without reported times."""
    times = [loader.wait_times for loader in loaders]
    busy = sum(one.busy for one in times)
    return min(1.0, sum(one.waited for one in times) / busy) if busy else None


def job_seconds_left(loaders: Sequence[LoaderProgress]) -> float | None:
    """Return the seconds until the job ends, where its loaders take turns; None where any loader's are unknown."""
    left = [loader.seconds_left for loader in loaders if loader.state != ENDED]
    known = [seconds for seconds in left if seconds is not None]
    return sum(known) if known and len(known) == len(left) else None


def wait_explanation(loaders: Sequence[LoaderProgress], processors: int = 0, *, has_full_tier: bool = False) -> str:
    """Return why the job has waited longest, and what would help. processors: of the node; 0 where unknown.
    has_full_tier: see `explain_wait`."""
    longest = max(loaders, key=lambda loader: loader.wait_times.waited, default=None)
    if longest is None or not longest.wait_times.waited:
        return ""
    sentence = explain_wait(longest.wait_times, processors, has_full_tier=has_full_tier)
    return f"{longest.name}: {sentence}" if sentence and len(loaders) > 1 else sentence


# --- of one consumer ------------------------------------------------------------------------------------------------


def current_epoch_of(view: ConsumerView) -> int:
    """Return the current epoch, counted from 1."""
    return view.loader.epochs if view.loader is not None and view.loader.epochs else view.epoch + 1


def planned_epochs_of(view: ConsumerView) -> int:
    """Return the number of all epochs; 0 where unknown. A published sampler of a loader has no end."""
    planned = view.loader.planned if view.loader is not None else view.epochs
    return planned if planned >= current_epoch_of(view) else 0


def done_share_of(view: ConsumerView) -> float | None:
    loader = view.loader
    if loader is not None and loader.epochs:
        return loader.epoch_samples / loader.epoch_length if loader.epoch_length else None
    # Without a loader's report, nothing tells whether the last samples of an ended consumer were read.
    return view.position / view.epoch_length if view.epoch_length and view.state != ENDED else None


def rate_of(view: ConsumerView) -> float:
    """Return the samples per second in this epoch; without a loader's report, those if reads never waited."""
    if view.state == ENDED:
        return 0.0
    loader = view.loader
    if loader is not None and loader.epochs:
        return loader.epoch_samples / loader.epoch_busy if loader.epoch_busy else 0.0
    return view.rate


def epoch_seconds_left_of(view: ConsumerView) -> float | None:
    rate = rate_of(view)
    loader = view.loader
    if loader is not None and loader.epochs:
        samples = loader.epoch_length - loader.epoch_samples if loader.epoch_length else None
    else:
        samples = view.epoch_length - view.position if view.epoch_length else None
    if view.state == ENDED:
        return 0.0
    return samples / rate if rate and samples is not None else None


def epoch_duration_of(view: ConsumerView) -> float | None:
    """Return the duration of a whole epoch: the average after the first epoch, else at the rate of this epoch."""
    loader, rate = view.loader, rate_of(view)
    if loader is None or not loader.epochs:
        return view.epoch_length / rate if rate and view.epoch_length else None
    epochs_before = loader.epochs - 2
    seconds = loader.busy - loader.first_busy - loader.epoch_busy
    if epochs_before > 0 and seconds > 0:
        return seconds / epochs_before
    return loader.epoch_length / rate if rate and loader.epoch_length else None


def share_text(share: OriginShare) -> str:
    """Return what a job wants of an origin and gets, in words."""
    own = f" (its share: {format_size(int(share.share))}/s)" if share.held_back else ""
    weight = f", weight {share.weight:g}" if share.held_back or share.weight != 1 else ""
    return (
        f"wants {format_size(int(share.wants))}/s of {share.origin}, gets {format_size(int(share.gets))}/s{own}{weight}"
    )
