"""Texts and tables of `cachectl job show` and `job list`."""

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from cachefs.formatting import format_count, format_duration
from cachefs.identity import OWNER_MARK
from cachefs.job_messages import JobList, JobView, ReadaheadView, RefetchedBytes
from cachefs.job_progress import (
    ENDED,
    RUNNING,
    LoaderProgress,
    current_epoch_of,
    group_by_loader,
    job_seconds_left,
    ranks_of_job,
    share_text,
    wait_explanation,
    waited_share,
)
from cachefs.trouble_texts import Cause, describe_trouble
from cachefs_tools.cachectl.command_session import to_json_types
from cachefs_tools.cachectl.display import size, table
from cachefs_tools.escaped_names import escape_name

# Meaning of the columns, for `job show --help`.
COLUMNS: Final = """\
\b
LOADER  the class of the loader's dataset and the line of the program that
        made the loader; else the name of the consumer
RANKS   how many ranks of the job read by this loader on this node; the
        row shows the rank that is behind the others
STATE   learning: which files the samples are is being found out, and the
        next epoch is read ahead
        waiting, preparing: it has not begun, or has published no order
        following: it reads what it has published
        standing still: nothing of it was seen for 10 s
        not followed: it reads something else than it has published
EPOCH   counted from 1; of how many, where the program's arguments
        (--epochs N) or the publication say so
DONE    how much of this epoch the loader has delivered
LEFT    time until the end of this epoch, at the pace of this epoch; of
        the whole job: in the line above the table
RATE    samples per second in this epoch, of all ranks
WAITED  part of the loader's time, in all epochs, in which the training
        loop waited for the next batch: measured in the process, from
        when the loop asks for a batch until it gets the batch. Reading
        and decoding both count. "-" where no DataLoader is watched
AHEAD   bytes that the loader will read in this epoch and the next, and
        that are on this node already
"""
MAX_NOTES: Final = 16
# Readahead rules (cachefs.planning.prefetch.readahead_budget.ReadaheadRule), in words.
RULES: Final = {
    "listing": "next files",
    "pass": "same order again",
    "file": "steps in a file",
    "rest": "rest of a file",
    "shards": "next shards",
    "set": "rest of a directory",
}


def describe(view: JobView, *, each_rank: bool = False) -> Iterator[str | Text | Table]:
    """Yield the lines of `job show`. each_rank: a row for each rank."""
    loaders = group_by_loader(view.consumers)
    age = format_duration(max(0.0, time.time() - view.started))
    # The user's own jobs are shown with the name that the user gave; those of others need the full one.
    job = view.job.removesuffix(f"{OWNER_MARK}{os.geteuid()}")
    yield f"{escape_name(job)}: {state_text(view)}, {age} old, published by {view.source or 'an unknown program'}"
    yield f"reads {escape_name(view.dataset)}, snapshot {view.snapshot}"
    now = time.time()
    for trouble in view.troubles:
        yield f"! {escape_name(describe_trouble(trouble, now))}"
    if how_far := progress_text(view, loaders):
        yield how_far
    yield waiting_text(loaders, has_full_tier=any(trouble.cause == Cause.TIER for trouble in view.troubles))
    if view.fetched_bytes or view.peer_bytes or view.stalls:
        yield fetched_text(view)
    yield from share_lines(view)
    if view.fetched_again:
        yield fetched_again_text(view.fetched_again)
    yield ""
    rows = [LoaderProgress(one.name, [each]) for one in loaders for each in one.consumers] if each_rank else loaders
    yield loader_table(rows, each_rank=each_rank)
    yield from remarks(view)


def job_document(view: JobView) -> dict[str, Any]:
    """Return the document of a job, with ranges of epochs instead of each number, and epochs counted from 1."""
    document: dict[str, Any] = to_json_types(view)
    for one, consumer in zip(view.consumers, document["consumers"], strict=True):
        consumer["known_epochs"] = ranges(one.known_epochs)
        consumer["epoch_number"] = current_epoch_of(one)
    return document


def ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as ranges of first and last number."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def fetched_text(view: JobView) -> str:
    """Return the bytes fetched for a job and the number of its waiting reads, as far as they are attributed to it."""
    peers = f" from origins, {size(view.peer_bytes)} from other nodes" if view.peer_bytes else ""
    waited = f"{format_count(view.stalls, 'read')} waited at the mount, {view.stall_seconds:.1f} s in all"
    verb = "waits" if view.waiting == 1 else "wait"
    still = (
        f", and {view.waiting:,} of them still {verb}, the first for {format_duration(view.longest)}"
        if view.waiting
        else ""
    )
    return f"fetched for it: {size(view.fetched_bytes)}{peers}; {waited}{still}"


def share_lines(view: JobView) -> Iterator[str]:
    """Yield a line for each origin that the job uses. A trouble says what holds the job back."""
    yield from (escape_name(share_text(share)) for share in view.origins)
    if not view.origins and view.weight != 1:
        yield f"weight {view.weight:g} where it shares an origin"


def fetched_again_text(epochs: Sequence[RefetchedBytes]) -> str:
    """Return what a job has fetched although the node had it before, and why, as far as known."""
    last = epochs[-1]
    words = f"fetched again: {size(last.bytes)} in epoch {last.epoch + 1}"
    if len(epochs) > 1:
        words += f", {size(sum(epoch.bytes for epoch in epochs))} in {format_count(len(epochs), 'epoch')}"
    if last.tiers < last.dataset:
        words += f"; the tiers have room for {size(last.tiers)} of {size(last.dataset)}"
        words += ", and the page cache has lost the rest"
    return words


def progress_text(view: JobView, loaders: Sequence[LoaderProgress]) -> str:
    """Return the progress of the job and its remaining time, as far as known; else ""."""
    if view.state != RUNNING or not loaders:
        return ""
    now = min((loader for loader in loaders if loader.state != ENDED), key=lambda one: one.epoch, default=loaders[0])
    words = [f"epoch {now.epoch}" + (f" of {now.epochs}" if now.epochs else "")]
    left = job_seconds_left(loaders)
    if left is not None:
        words.append(f"about {format_duration(left)} left")
    return ", ".join(words)


def waiting_text(loaders: Sequence[LoaderProgress], *, has_full_tier: bool = False) -> str:
    """Return the share of time that the job has waited for data, and why. has_full_tier: a tier takes no blocks."""
    share = waited_share(loaders)
    if share is None:
        return "how long the loop waited is not known: no DataLoader has given a batch yet"
    sentence = escape_name(wait_explanation(loaders, os.cpu_count() or 0, has_full_tier=has_full_tier))
    return f"the loop waited {percent(share)} of the time" + (f"; {sentence}" if sentence else "")


def loader_table(rows: Sequence[LoaderProgress], *, each_rank: bool = False) -> Table:
    many = max((row.ranks for row in rows), default=1) > 1 and not each_rank
    ranks = ">RANK " if each_rank else ">RANKS " if many else ""
    columns = f"LOADER {ranks}=STATE >EPOCH >DONE >LEFT >RATE >WAITED >AHEAD"
    return table(columns, (loader_row(row, ranks) for row in rows))


def loader_row(row: LoaderProgress, ranks: str) -> tuple[str, ...]:
    """Return a row of `job show`. ranks: the heading of the column of ranks, if there is one."""
    which = {">RANK ": (str(row.slowest.rank),), ">RANKS ": (str(row.ranks),)}.get(ranks, ())
    is_over = row.state == ENDED
    epoch = f"{row.epoch:,}/{row.epochs:,}" if row.epochs else f"{row.epoch:,}"
    left = row.epoch_seconds_left
    waited = row.wait_times
    return (
        escape_name(row.name), *which, row.state, epoch, "-" if row.done_share is None else percent(row.done_share),
        "-" if is_over or left is None else short_duration(left), "-" if is_over else f"{row.rate:,.0f}/s",
        percent(waited.waited_share) if waited.busy else "-",
        "-" if is_over else size(sum(consumer.ahead_bytes for consumer in row.consumers)),
    )  # fmt: skip


def remarks(view: JobView) -> Iterator[str]:
    """Yield problems (`!`) and unknown things (`?`), each once."""
    loaders_by_line: dict[str, list[str]] = {}
    for consumer in view.consumers:
        whose = consumer.loader.name if consumer.loader is not None else consumer.consumer
        for mark, remark in ("!", consumer.problem), ("?", consumer.note):
            if remark:
                loaders_by_line.setdefault(f"{mark}\n{remark}", []).append(whose)
    for number, (line, loaders) in enumerate(loaders_by_line.items()):
        if number == MAX_NOTES:
            yield f"… and {len(loaders_by_line) - MAX_NOTES} more, with --json"
            return
        mark, _, text = line.partition("\n")
        names = list(dict.fromkeys(loaders))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        # A note names its loader.
        is_named = mark == "?" and names[0] in text
        yield f"? {escape_name(text)}" if is_named else f"{mark} {escape_name(names[0])}{more}: {escape_name(text)}"


def state_text(view: JobView) -> str:
    """Return the state of a job; for a finished one also where it was, and why it ended."""
    loaders = group_by_loader(view.consumers)
    if view.state == RUNNING or not loaders:
        state = view.state
    else:
        last = max(loader.epoch for loader in loaders)
        state = f"{view.state} {_final_progress([loader for loader in loaders if loader.epoch == last])}"
    return f"{state} ({escape_name(view.reason)})" if view.reason else state


def _final_progress(loaders: Sequence[LoaderProgress]) -> str:
    """Return the progress of a finished job. loaders: those in its last epoch."""
    epoch, done = loaders[0].epoch, [loader.done_share for loader in loaders if loader.done_share is not None]
    if len(done) < len(loaders):
        return f"in epoch {epoch:,}"
    return (
        f"after {format_count(epoch, 'epoch')}" if min(done) >= 1 else f"in epoch {epoch:,}, {percent(min(done))} done"
    )


# --- job list -------------------------------------------------------------------------------------------------------


def describe_jobs(found: JobList) -> Iterator[str | Table]:
    """Yield the lines of `job list`."""
    if found.jobs:
        yield table("JOB DATASET =STATE >RANKS >EPOCH >DONE >JOB-LEFT >RATE >WAITED", map(job_row, found.jobs))
    else:
        yield "no job has published anything"
    if found.guessed:
        yield ""
        yield "readahead for programs that have published nothing:"
        yield table("DATASET =GUESSED >BLOCKS >BYTES >READ >UNREAD >PENDING", map(readahead_row, found.guessed))
        yield "UNREAD: not read in time; PENDING: may still be read"


def job_row(view: JobView) -> tuple[str, ...]:
    """Return a row of `job list`, for the loader that reads most."""
    loaders = group_by_loader(view.consumers)
    main = max(loaders, key=lambda one: one.wait_times.busy, default=None)
    share = waited_share(loaders)
    if main is None:
        position = ("-", "-", "-", "-")
    else:
        epoch = f"{main.epoch:,}/{main.epochs:,}" if main.epochs else f"{main.epoch:,}"
        is_over, left = view.state != RUNNING, job_seconds_left(loaders)
        position = (
            epoch, "-" if main.done_share is None else percent(main.done_share),
            "-" if is_over or left is None else short_duration(left), "-" if is_over else f"{main.rate:,.0f}/s",
        )  # fmt: skip
    return (
        escape_name(view.job), escape_name(view.dataset), view.state, str(ranks_of_job(view)), *position,
        "-" if share is None else percent(share),
    )  # fmt: skip


def readahead_row(view: ReadaheadView) -> tuple[str, ...]:
    """Return a row of readahead. Blocks that are neither read nor given up are open: they may still be read."""
    counts = view.counts
    still_open = max(0, counts.bytes - counts.right_bytes - counts.wrong_bytes)
    return (
        escape_name(view.dataset) or view.snapshot[:12], RULES.get(view.rule, view.rule), f"{counts.blocks:,}",
        size(counts.bytes),
        size(counts.right_bytes), size(counts.wrong_bytes), size(still_open),
    )  # fmt: skip


def percent(share: float) -> str:
    """Format a share from 0 to 1 in percent; `100 %` and `0 %` are exact."""
    if 0 < share < 0.01:
        return "<1 %"
    return "99 %" if 0.99 < share < 1 else f"{100 * min(share, 1.0):.0f} %"


def short_duration(seconds: float) -> str:
    """Format a time in one or two units and few characters, such as `3h20m`."""
    return (
        format_duration(seconds)
        .replace(" min", "m")
        .replace(" h", "h")
        .replace(" d", "d")
        .replace(" s", "s")
        .replace(" ", "")
    )
