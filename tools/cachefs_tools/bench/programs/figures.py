"""Combines the runs of a program: equal results, shares of waits removed, and the epoch whose order was known first."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cachefs_tools.bench.programs.catalogue import Program
from cachefs_tools.bench.programs.outcome import Mode, Outcome

# Seconds of waits below which a share of them is meaningless.
LEAST_WAIT: Final = 0.5
# A run counts as slower if it waits longer than an unpublished one by more than this noise of two runs.
NOISE_SHARE: Final = 0.05
NOISE_SECONDS: Final = 0.5
# Allowed slowdown against the local disk of a program whose data is cached.
WARM_AIM: Final = 1.03


def share_gone(native: Outcome, reference: Outcome, outcome: Outcome) -> float | None:
    """Return the share of the reference's waits beyond the native run that *outcome* does not have; None below
    LEAST_WAIT."""
    there = reference.wait - native.wait
    return 1 - (outcome.wait - native.wait) / there if there >= LEAST_WAIT else None


def share_at_best(native: Outcome, mounted: Sequence[Outcome], bandwidth: float) -> float | None:
    """Return the share of the bare run's waits beyond the native run that could be removed at best, starting with the
    program: all bytes have to pass the link, while the program computes. The program cannot compute before its first
    samples, so the least number of bytes of any run until then has to pass first. This is an estimate, since another
    way of fetching may need fewer.

    mounted: the bare run, and others. bandwidth: bytes per second of the link to the origin; 0: unlimited.
    """
    bare = mounted[0]
    there = bare.wait - native.wait
    if there < LEAST_WAIT or not bandwidth or not native.epochs:
        return None
    first = native.epochs[0]  # later epochs find everything on the node
    left = max(0.0, bare.origin_bytes / bandwidth - (first.end - first.begin))
    if first.first > first.begin:
        left = max(left, min(one.first_bytes for one in mounted) / bandwidth - (first.first - first.begin))
    return max(0.0, 1 - left / there)


def known_from(outcome: Outcome) -> tuple[int, float] | None:
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


def document(program: Program, outcomes: Mapping[Mode, Outcome], bandwidth: float = 0) -> dict[str, Any]:
    """Return all figures of one program as a JSON-serialisable document. bandwidth: see `share_at_best`."""
    result: dict[str, Any] = {
        **_names(program), "equal": len({outcome.digest for outcome in outcomes.values()}) == 1,
        "modes": {str(mode): _mode_document(outcome) for mode, outcome in outcomes.items()}, "gone": {},
    }  # fmt: skip
    if (native := outcomes.get(Mode.NATIVE)) is not None:
        for reference, mode in ((Mode.BARE, Mode.MOUNTED), (Mode.BARE, Mode.RUN), (Mode.MOUNTED, Mode.RUN)):
            if reference in outcomes and mode in outcomes:
                share = share_gone(native, outcomes[reference], outcomes[mode])
                result["gone"][f"{mode} of {reference}"] = None if share is None else round(share, 3)
        if Mode.BARE in outcomes:
            mounted = [outcomes[mode] for mode in (Mode.BARE, Mode.MOUNTED, Mode.RUN) if mode in outcomes]
            best = share_at_best(native, mounted, bandwidth)
            result["at_best"] = None if best is None else round(best, 3)
    if (run := outcomes.get(Mode.RUN)) is not None:
        result["known_from_epoch"], result["known_after"] = known_from(run) or (None, None)
        result["said"], result["problems"] = list(run.said), list(run.published.problems)
        others = [outcomes[mode].wait for mode in (Mode.BARE, Mode.MOUNTED) if mode in outcomes]
        result["slower"] = bool(others) and run.wait > max(others) * (1 + NOISE_SHARE) + NOISE_SECONDS
    return result


def warm_document(program: Program, outcomes: Mapping[Mode, Sequence[Outcome]]) -> dict[str, Any]:
    """Return the medians of several runs of a program with a warm page cache, and their ratios to the native one."""
    modes = {
        str(mode): {
            "epochs": statistics.median(outcome.seconds for outcome in runs),
            "wall": statistics.median(outcome.wall for outcome in runs),
        }
        for mode, runs in outcomes.items()
    }
    native = modes[str(Mode.NATIVE)]
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


def _mode_document(outcome: Outcome) -> dict[str, Any]:
    return {
        "wait": round(outcome.wait, 3), "waits": [round(epoch.wait, 3) for epoch in outcome.epochs],
        "seconds": round(outcome.seconds, 2), "wall": round(outcome.wall, 2), "origin_bytes": outcome.origin_bytes,
        "first_bytes": outcome.first_bytes,
        "stall_seconds": round(outcome.stall_seconds, 2),
        "samples": sum(epoch.samples for epoch in outcome.epochs), "digest": outcome.digest,
    }  # fmt: skip
