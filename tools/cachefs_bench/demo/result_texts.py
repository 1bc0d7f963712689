"""Texts about the demo's figures, in lines of up to 80 columns, shared by chart and picture."""

from typing import Final

from cachefs_tools.cachectl.display import size

from cachefs_bench.demo.results import DemoResult, DemoRun
from cachefs_bench.demo.settings import STORE_LIMITS, DemoSettings

COMPUTING: Final = "computing"
WAITING: Final = "waiting for samples"
# Seconds. A longer wait for a batch is a wait for a daemon.
NOTICED_SECONDS: Final = 0.5
KILLED_HERE: Final = "the daemon is killed here"


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
