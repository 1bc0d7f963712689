"""Results of the demo as plain records, checks of them, and texts about them, which chart and picture share."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from cachefs.errors import CachefsError
from cachefs_bench.demo.settings import STORE_LIMITS, DemoSettings
from cachefs_tools.cachectl.display import size

COMPUTING: Final = "computing"
WAITING: Final = "waiting for samples"
# Seconds. A longer wait for a batch is a wait for a daemon.
NOTICED_SECONDS: Final = 0.5
KILLED_HERE: Final = "the daemon is killed here"


@dataclass(frozen=True, slots=True)
class LoopPosition:
    """The progress of the training loop."""

    epoch: int = 0
    samples: int = 0  # computed in this epoch
    seconds: float = 0.0  # since the epoch began
    waited: float = 0.0  # seconds of them that the loop waited for a batch


@dataclass(frozen=True, slots=True)
class TrainedEpoch:
    """The loop's measurements of one epoch. Times are in seconds."""

    epoch: int
    samples: int
    bytes: int
    seconds: float
    waited: float
    slowest_wait: float  # longest wait for one batch
    digest: str  # of the bytes of all samples, in order of arrival


@dataclass(frozen=True, slots=True)
class DemoEpoch:
    """One epoch of one run."""

    trained: TrainedEpoch
    positions: Sequence[LoopPosition]  # after each batch
    requests: int  # to the object store meanwhile
    bytes: int  # from the object store meanwhile

    @property
    def waiting(self) -> float:
        """Share of time that the loop waited for samples."""
        return self.trained.waited / self.trained.seconds


@dataclass(frozen=True, slots=True)
class DemoRun:
    """The training loop with one data source."""

    name: str  # for machines
    title: str
    explanation: str  # a short description
    epochs: Sequence[DemoEpoch]
    listing_requests: int  # to the object store before the first epoch


@dataclass(frozen=True, slots=True)
class KillEffect:
    """The effect of the daemon's kill on a run. Times are in seconds."""

    position: LoopPosition  # position of the loop
    downtime: float  # from the kill until the restarted daemon answered
    held_before: int  # blocks in its tiers shortly before
    held_after: int  # blocks in them when it answered again
    requests: int  # to the object store, from the kill until the run was over and the daemon answered
    slowest_wait: float  # longest wait for a batch in the rest of that epoch


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The results of all runs of the demo."""

    files: int
    bytes: int
    runs: Sequence[DemoRun]  # the last one reads the local disk
    killed: DemoRun
    kill: KillEffect

    def all_runs(self) -> Iterator[DemoRun]:
        yield from self.runs
        yield self.killed


def require_equal_bytes(story: DemoResult) -> None:
    """Raise CachefsError unless every run has read every byte of the dataset, in the same order."""
    native = story.runs[-1]
    for run in story.all_runs():
        for ours, its in zip(run.epochs, native.epochs, strict=True):
            found, expected = ours.trained, its.trained
            if found.samples != story.files or found.bytes != story.bytes:
                raise CachefsError(
                    f"{run.title}: epoch {found.epoch + 1} has {found.samples:,} samples with {found.bytes:,} bytes,"
                    f" not {story.files:,} with {story.bytes:,}"
                )
            if found.digest != expected.digest:
                raise CachefsError(
                    f"{run.title}: epoch {found.epoch + 1} gave other bytes than the local disk:"
                    f" digest {found.digest[:16]}, not {expected.digest[:16]}"
                )


def longest_wait(positions: Sequence[LoopPosition], since: LoopPosition) -> float:
    """Return the longest wait for a batch after position *since*, in seconds."""
    later = [position for position in positions if position.samples >= since.samples]
    return max((after.waited - before.waited for before, after in pairwise(later)), default=0.0)


def sample_rates(positions: Sequence[LoopPosition], intervals: int) -> list[float]:
    """Return samples per second in equal intervals of an epoch. A batch counts for all the time since the previous
    one."""
    width = positions[-1].seconds / intervals
    samples = [0.0] * intervals
    before = LoopPosition()
    for position in positions:
        rate = (position.samples - before.samples) / max(position.seconds - before.seconds, 1e-9)
        for number in range(int(before.seconds / width), intervals):
            overlap = min(position.seconds, (number + 1) * width) - max(before.seconds, number * width)
            if overlap <= 0:
                break
            samples[number] += rate * overlap
        before = position
    return [count / width for count in samples]


def result_document(story: DemoResult) -> dict[str, Any]:
    """Return the JSON document. Times are in seconds."""
    kill = story.kill
    return {
        "files": story.files,
        "bytes": story.bytes,
        "runs": [_run_document(run) for run in story.runs],
        "killed": {
            **_run_document(story.killed),
            "killed_in_epoch": kill.position.epoch + 1,
            "killed_at_sample": kill.position.samples,
            "daemon_away_seconds": kill.downtime,
            "slowest_wait_after": kill.slowest_wait,
            "blocks_before": kill.held_before,
            "blocks_after": kill.held_after,
            "requests_after": kill.requests,
        },
    }


def _run_document(run: DemoRun) -> dict[str, Any]:
    return {
        "run": run.name,
        "title": run.title,
        "explanation": run.explanation,
        "listing_requests": run.listing_requests,
        "epochs": [
            {**asdict(epoch.trained), "epoch": epoch.trained.epoch + 1, "waiting": epoch.waiting,
             "origin_requests": epoch.requests, "origin_bytes": epoch.bytes}
            for epoch in run.epochs
        ],
    }  # fmt: skip


def heading(story: DemoResult, settings: DemoSettings) -> str:
    """Return a description of the training."""
    readers = "1 reader" if settings.workers == 1 else f"{settings.workers} readers"
    computing = f"{1e3 * settings.compute:g} ms of computing per sample"
    return f"{story.files:,} files, {size(story.bytes)}, shuffled; {computing}, {readers}"


def store_text() -> str:
    """Return a description of the object store."""
    return (
        f"origin: an S3 server that answers after {1e3 * STORE_LIMITS.latency:.0f} ms "
        f"(p99 {1e3 * STORE_LIMITS.latency_p99:.0f} ms), with {STORE_LIMITS.bandwidth / 1e6:.0f} MB/s"
    )


def kill_lines(story: DemoResult) -> list[str]:
    """Return the effect of the daemon's kill."""
    kill = story.kill
    lines = [
        f"Killed at sample {kill.position.samples:,} of {story.files:,}. "
        f"The next daemon answered {kill.downtime:.1f} s later.",
        f"Longest wait for a batch after the kill: {1e3 * kill.slowest_wait:,.0f} ms. All samples were read.",
        f"Blocks in the tiers: {kill.held_before:,} before the kill, {kill.held_after:,} after it.",
        f"Requests to the object store since the kill: {kill.requests:,}.",
        "The kernel's pages had been dropped before that epoch, so it needed the tiers.",
    ]
    if kill.slowest_wait > NOTICED_SECONDS and kill.held_before < story.files:
        lines.append("It needed blocks that were in no tier yet, which the next daemon had to fetch.")
    return lines


def verdict_lines(story: DemoResult) -> list[str]:
    """Return the conclusion from all runs."""
    direct, native = _seconds(story.runs[0]), _seconds(story.runs[-1])
    published = next(_seconds(run) for run in story.runs if run.name == "run")
    digests = ", ".join(epoch.trained.digest[:8] for epoch in story.runs[-1].epochs)
    runs = len(list(story.all_runs()))
    return [
        f"Both epochs: S3 {direct:.1f} s, cachefs run {published:.1f} s, local disk {native:.1f} s.",
        f"All {runs} runs read the same bytes in the same order. SHA-256: {digests}.",
        "Computing is a sleep. cachefs asks twice where an answer of the store is late.",
    ]


def _seconds(run: DemoRun) -> float:
    return sum(epoch.trained.seconds for epoch in run.epochs)
