"""The summary lines of `cachefs run`: what the job has read, how long it waited, and what would help."""

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from cachefs.formatting import format_count, format_duration
from cachefs.publishing.run_record import (
    LoaderRecord,
    MountBytes,
    ProcessRecord,
    bytes_by_mount,
    sum_loaders,
    worst_troubles,
)
from cachefs.publishing.waiting import WaitTimes, explain_wait
from cachefs.sizes import format_size
from cachefs.trouble_texts import Cause

# Maximum number of loaders with lines of their own: those that took most time.
MAX_LOADERS: Final = 4
# Maximum number of lines about troubles; and the part of the loop's wait from which on a trouble is the cause.
MAX_TROUBLES: Final = 4
PART_OF_WAIT: Final = 0.3


def summary_lines(records: Sequence[ProcessRecord], printed_keys: Collection[str] = ()) -> list[str]:
    """Return the summary of a run from its training processes' records; empty where no loader has delivered anything.
    printed_keys: keys of troubles to leave out, as the user was told of them just now."""
    loaders, troubles = loaders_by_name(records), worst_troubles(records)
    told = [one.line for one in troubles if one.key not in printed_keys][:MAX_TROUBLES]
    if not loaders:
        return told
    busy, waited = sum(one.busy for one in loaders), sum(one.waited for one in loaders)
    longest = max(sum(one.busy for one in record.loaders) for record in records)
    many = f" in {len(records)} processes" if len(records) > 1 else ""
    found = [
        f"{_epochs_text(loaders[0])}, {_delivered_text(loaders)}{many} in {format_duration(longest)}; "
        f"the loop waited {percent(waited, busy)} of the time"
    ]
    if len(loaders) > 1:
        found += map(_loader_line, loaders[:MAX_LOADERS])
        if len(loaders) > MAX_LOADERS:
            found.append(f"  and {len(loaders) - MAX_LOADERS} other loaders")
    fetched = bytes_by_mount(records)
    problem = next((record.problem for record in records if record.problem), "")
    if problem:
        found.append(f"the sources that served the reads are unknown: {problem}")
    elif served := served_by(loaders, total_bytes(fetched.values()), peers_part(records)):
        found.append(served)
    came = total_bytes(fetched.values())
    # A trouble that failed reads, or lasted long, is why the job waited: advice on speed would not help.
    longest_wait = max(one.waited for one in loaders)
    is_why = any(one.failed or one.waited >= PART_OF_WAIT * longest_wait for one in troubles)
    why = "" if is_why else advice(loaders, records, came.missed / max(1, bytes_read(loaders, came)))
    return [*found, *told, *([why] if why else [])]


def loaders_by_name(records: Sequence[ProcessRecord]) -> list[LoaderRecord]:
    """Return the loaders of all processes that have delivered anything, each name once; the busiest first."""
    named: dict[str, list[LoaderRecord]] = {}
    for record in records:
        for one in record.loaders:
            if one.samples:
                named.setdefault(one.name, []).append(one)
    return sorted(map(sum_loaders, named.values()), key=lambda one: -one.busy)


def _epochs_text(one: LoaderRecord) -> str:
    """Return how many epochs a loader has begun, and its position in an unfinished last one."""
    epochs = format_count(one.epochs, "epoch")
    if one.epoch_samples >= one.epoch_length:
        return epochs
    return f"{epochs} ({percent(one.epoch_samples, one.epoch_length)} of the last one)"


def _delivered_text(loaders: Sequence[LoaderRecord]) -> str:
    """Return how much the loaders have delivered: in batches where the samples in some of them could not be counted."""
    if any(one.unmeasured for one in loaders):
        return format_count(sum(one.batches for one in loaders), "batch", "batches")
    return format_count(sum(one.samples for one in loaders), "sample")


def _loader_line(one: LoaderRecord) -> str:
    return (
        f"  {one.name}: {_epochs_text(one)}, {_delivered_text([one])}, the loop waited {percent(one.waited, one.busy)}"
    )


def total_bytes(mounts: Iterable[MountBytes]) -> MountBytes:
    """Return the sum over all mounts."""
    ones = list(mounts)
    return MountBytes(sum(one.memory for one in ones), sum(one.ssd for one in ones), sum(one.missed for one in ones))


def peers_part(records: Sequence[ProcessRecord]) -> float:
    """Return the part of the fetched bytes that came from other nodes."""
    peers = max((record.peer_bytes for record in records), default=0)
    fetched = max((record.fetched_bytes for record in records), default=0)
    return peers / (peers + fetched) if peers else 0.0


def bytes_read(loaders: Sequence[LoaderRecord], came: MountBytes) -> float:
    """Return the bytes that the loaders have read, including those from the page cache where they are known."""
    at_mounts = came.memory + came.ssd + came.missed
    return max(at_mounts, sum(one.bytes for one in loaders)) if all(one.bytes for one in loaders) else at_mounts


def served_by(loaders: Sequence[LoaderRecord], came: MountBytes, peers: float) -> str:
    """Return which sources served the reads; "" where nothing is known. Bytes that never came to a mount were in the
    page cache. came: bytes that came to the mounts; peers: the part of the fetched bytes that came from other nodes."""
    at_mounts = came.memory + came.ssd + came.missed
    known = all(one.bytes for one in loaders)
    read = bytes_read(loaders, came)
    if not read:
        return ""
    parts: list[tuple[str, float]] = [
        ("page cache", read - at_mounts), ("memory", came.memory), ("SSD", came.ssd),
        ("other nodes", came.missed * peers), ("origin", came.missed * (1 - peers)),
    ]  # fmt: skip
    shown = ", ".join(f"{name} {percent(part, read)}" for name, part in parts if part > 0)
    beside = "" if known else " (the share of the page cache is unknown)"
    return f"served by: {shown} of {format_size(int(read))}{beside}"


def advice(loaders: Sequence[LoaderRecord], records: Sequence[ProcessRecord], fetched_part: float) -> str:
    """Return what to change for the loader that waited longest; "" where the job has hardly waited.

    fetched_part: the part of all bytes read that had to be fetched.
    """
    one = max(loaders, key=lambda loader: loader.waited)
    stalled: dict[str, float] = {}
    for record in records:
        for kind, seconds in record.stalls.items():
            stalled[kind] = max(stalled.get(kind, 0.0), seconds)
    processes = max(1, sum(any(each.name == one.name for each in record.loaders) for record in records))
    why = explain_wait(
        WaitTimes(
            one.busy / processes, one.waited / processes, one.first_busy / processes, one.first_waited / processes,
            one.workers, {kind: seconds / processes for kind, seconds in stalled.items()},
            was_learned=one.was_learned, is_unknown=bool(one.note) and not one.was_learned, fetched_part=fetched_part,
            has_figures=not any(record.problem for record in records),
            processes=processes,
        ),
        len(os.sched_getaffinity(0)),
        has_full_tier=any(one.key.startswith(f"{Cause.TIER} ") for record in records for one in record.troubles),
    )  # fmt: skip
    return f"to wait less: {why}" if why else ""


def percent(part: float, whole: float) -> str:
    """Return a share in percent, such as `12 %`; `<1 %` for a smaller share that is not 0."""
    share = 100 * part / whole if whole > 0 else 0.0
    return "<1 %" if 0 < share < 1 else f"{min(share, 100):.0f} %"
