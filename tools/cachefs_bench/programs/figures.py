"""Combines the runs of a program: equal results, shares of waits removed, and the epoch whose order was known first.

`ProgramOutcome` is the result of one run.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from cachefs_bench.programs.catalogue import Program

# Seconds of waits below which a share of them is meaningless.
MIN_WAIT: Final = 0.5
# A run counts as slower if it waits longer than an unpublished one by more than this noise of two runs.
NOISE_SHARE: Final = 0.05
NOISE_SECONDS: Final = 0.5
# Allowed slowdown against the local disk of a program whose data is cached.
WARM_AIM: Final = 1.03


class RunMode(StrEnum):
    """The ways to run a program."""

    NATIVE = "native"  # on the local disk, with cached pages
    BARE = "bare"  # mounted, nothing published, without readahead
    MOUNTED = "mounted"  # mounted, nothing published, with readahead by rules
    RUN = "run"  # under `cachefs run`


@dataclass(frozen=True, slots=True)
class ProgramEpoch:
    """An epoch of a program. Times are seconds of CLOCK_MONOTONIC."""

    begin: float
    end: float
    wait: float  # seconds that the program waited for data
    samples: int
    first: float = 0.0  # when it had its first samples and began to compute; 0: not reported


@dataclass(frozen=True, slots=True)
class PublishedSequences:
    """Sequences that a run published, as the daemon reported them."""

    # Consumer -> its epochs (from 0) with a known order, and when that was first seen (CLOCK_MONOTONIC).
    known: dict[str, dict[int, float]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """Results of one run."""

    mode: RunMode
    digest: str  # of everything that the program has read and computed
    epochs: tuple[ProgramEpoch, ...]
    wall: float  # seconds from the start of the process to its end
    cachefs_lines: tuple[str, ...] = ()  # cachefs's lines on the program's standard error
    origin_bytes: int = 0
    stall_seconds: float = 0.0  # waits of reads for the origin, sum of all readers
    published: PublishedSequences = PublishedSequences()
    # Bytes from the origin between the begin of the first epoch and its first samples.
    first_bytes: int = 0

    @property
    def wait(self) -> float:
        """Seconds that the program waited in all its epochs."""
        return sum(epoch.wait for epoch in self.epochs)

    @property
    def seconds(self) -> float:
        """Seconds from the begin of the first epoch to the end of the last."""
        return self.epochs[-1].end - self.epochs[0].begin


def removed_share(native: ProgramOutcome, reference: ProgramOutcome, outcome: ProgramOutcome) -> float | None:
    """Return the share of the reference's waits beyond the native run that *outcome* does not have; None below
    MIN_WAIT."""
    there = reference.wait - native.wait
    return 1 - (outcome.wait - native.wait) / there if there >= MIN_WAIT else None


def best_removable_share(native: ProgramOutcome, mounted: Sequence[ProgramOutcome], bandwidth: float) -> float | None:
    """Return the share of the bare run's waits beyond the native run that could be removed at best, starting with the
    program: all bytes have to pass the link, while the program computes. The program cannot compute before its first
    samples, so the least number of bytes of any run until then has to pass first. This is an estimate, since another
    way of fetching may need fewer.

    mounted: the bare run, and others. bandwidth: bytes per second of the link to the origin; 0: unlimited.
    """
    bare = mounted[0]
    there = bare.wait - native.wait
    if there < MIN_WAIT or not bandwidth or not native.epochs:
        return None
    first = native.epochs[0]  # later epochs find everything on the node
    left = max(0.0, bare.origin_bytes / bandwidth - (first.end - first.begin))
    if first.first > first.begin:
        left = max(left, min(one.first_bytes for one in mounted) / bandwidth - (first.first - first.begin))
    return max(0.0, 1 - left / there)


def first_known_epoch(outcome: ProgramOutcome) -> tuple[int, float] | None:
    """Return the first epoch, counted from 1, whose order was published before it ended, and the share of its time that
    had passed then (0: known before the epoch). None: no order was known."""
    firsts = [min(known.items()) for known in outcome.published.known.values() if known]
    found = []
    for first, when in firsts:
        for number, epoch in enumerate(outcome.epochs):
            # A loader that publishes its order in parts counts each part as an epoch.
            if when < epoch.end and number >= min(first, len(outcome.epochs) - 1):
                passed = (when - epoch.begin) / (epoch.end - epoch.begin)
                found.append((number + 1, round(max(0.0, passed), 3)))
                break
    return min(found, default=None)


def document(program: Program, outcomes: Mapping[RunMode, ProgramOutcome], bandwidth: float = 0) -> dict[str, Any]:
    """Return all figures of one program as a JSON-serialisable document. bandwidth: see `best_removable_share`."""
    result: dict[str, Any] = {
        **_names(program), "equal": len({outcome.digest for outcome in outcomes.values()}) == 1,
        "modes": {str(mode): _mode_document(outcome) for mode, outcome in outcomes.items()}, "gone": {},
    }  # fmt: skip
    if (native := outcomes.get(RunMode.NATIVE)) is not None:
        for reference, mode in (
            (RunMode.BARE, RunMode.MOUNTED),
            (RunMode.BARE, RunMode.RUN),
            (RunMode.MOUNTED, RunMode.RUN),
        ):
            if reference in outcomes and mode in outcomes:
                share = removed_share(native, outcomes[reference], outcomes[mode])
                result["gone"][f"{mode} of {reference}"] = None if share is None else round(share, 3)
        if RunMode.BARE in outcomes:
            mounted = [outcomes[mode] for mode in (RunMode.BARE, RunMode.MOUNTED, RunMode.RUN) if mode in outcomes]
            best = best_removable_share(native, mounted, bandwidth)
            result["at_best"] = None if best is None else round(best, 3)
    if (run := outcomes.get(RunMode.RUN)) is not None:
        result["known_from_epoch"], result["known_after"] = first_known_epoch(run) or (None, None)
        result["said"], result["problems"] = list(run.cachefs_lines), list(run.published.problems)
        others = [outcomes[mode].wait for mode in (RunMode.BARE, RunMode.MOUNTED) if mode in outcomes]
        result["slower"] = bool(others) and run.wait > max(others) * (1 + NOISE_SHARE) + NOISE_SECONDS
    return result


def warm_document(program: Program, outcomes: Mapping[RunMode, Sequence[ProgramOutcome]]) -> dict[str, Any]:
    """Return the medians of several runs of a program with a warm page cache, and their ratios to the native one."""
    modes = {
        str(mode): {
            "epochs": statistics.median(outcome.seconds for outcome in runs),
            "wall": statistics.median(outcome.wall for outcome in runs),
        }
        for mode, runs in outcomes.items()
    }
    native = modes[str(RunMode.NATIVE)]
    return {
        **_names(program),
        "warm_equal": len({one.digest for runs in outcomes.values() for one in runs}) == 1,
        "warm": modes,
        "of_native": {
            what: {name: round(found[what] / native[what], 3) for name, found in modes.items()}
            for what in ("epochs", "wall")
        },
    }


def _names(program: Program) -> dict[str, Any]:
    return {"program": program.name, "title": program.title, "access": str(program.access), "aim": program.aim}


def _mode_document(outcome: ProgramOutcome) -> dict[str, Any]:
    return {
        "wait": round(outcome.wait, 3), "waits": [round(epoch.wait, 3) for epoch in outcome.epochs],
        "seconds": round(outcome.seconds, 2), "wall": round(outcome.wall, 2), "origin_bytes": outcome.origin_bytes,
        "first_bytes": outcome.first_bytes,
        "stall_seconds": round(outcome.stall_seconds, 2),
        "samples": sum(epoch.samples for epoch in outcome.epochs), "digest": outcome.digest,
    }  # fmt: skip
