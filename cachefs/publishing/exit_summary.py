"""Prints the summary of a run, as its first Python process ends: what it has read, how long it waited, what would help.

Printing never takes longer than EXIT_SECONDS, and whatever goes wrong, the job ends as it would have.
"""

import errno
import io
import os
import re
import select
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from cachefs.formatting import format_count, format_duration
from cachefs.mount_table import mount_points
from cachefs.publishing import channel, run_record
from cachefs.publishing.job_exceptions import suppress_own
from cachefs.publishing.run_record import (
    LoaderRecord,
    MountBytes,
    ProcessRecord,
    bytes_by_mount,
    sum_loaders,
    worst_troubles,
)
from cachefs.publishing.stderr import is_writable_now, without_sigpipe
from cachefs.publishing.waiting import WaitTimes, explain_wait
from cachefs.sizes import format_size
from cachefs.trouble_texts import Cause

# Maximum number of loaders with lines of their own: those that took most time.
MAX_LOADERS: Final = 4
# Maximum number of lines about troubles; and the part of the loop's wait from which on a trouble is the cause.
MAX_TROUBLES: Final = 4
PART_OF_WAIT: Final = 0.3
# Maximum delay in seconds of the end of the job, on a node so busy that the helper, or the process that asks for the
# cause of a failed read, gets no processor.
EXIT_SECONDS: Final = 5.0
_PAUSE: Final = 0.01
# Maximum number of chained exceptions examined.
MAX_CHAINED: Final = 16
_READ_ERRNOS: Final = (errno.EACCES, errno.ESTALE, errno.EIO)
# Summary of a job whose loaders were not seen to read below a mount. Files opened by C libraries are not seen, unless a
# list or an attribute of the dataset names them.
_NO_MOUNT: Final = (
    "no DataLoader was seen to read from a mount, so nothing was read ahead; `cachectl mounts` lists the directories "
    "to read from"
)
# Keys of the troubles that were printed as this program ended.
_printed_keys: Final[list[str]] = []
# Matches the last line of a message: `[Errno 13] Permission denied: '/data/7.jpg'`.
_PATH: Final = re.compile(r"\[Errno \d+\] [^:\n]*: ['\"]([^\n]*)['\"]\s*$")


def summary_lines(records: Sequence[ProcessRecord], printed_keys: Collection[str] = ()) -> list[str]:
    """Return the summary of a run from its training processes' records; empty where no loader has delivered anything.
    printed_keys: keys of troubles to leave out, as the user was told of them just now."""
    loaders, troubles = loaders_by_name(records), worst_troubles(records)
    trouble_lines = [trouble.line for trouble in troubles if trouble.key not in printed_keys][:MAX_TROUBLES]
    if not loaders:
        return trouble_lines
    busy, waited = sum(loader.busy for loader in loaders), sum(loader.waited for loader in loaders)
    longest = max(sum(loader.busy for loader in record.loaders) for record in records)
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
    longest_wait = max(loader.waited for loader in loaders)
    is_why = any(trouble.failed or trouble.waited >= PART_OF_WAIT * longest_wait for trouble in troubles)
    why = "" if is_why else advice(loaders, records, came.missed / max(1, bytes_read(loaders, came)))
    return [*found, *trouble_lines, *([why] if why else [])]


def loaders_by_name(records: Sequence[ProcessRecord]) -> list[LoaderRecord]:
    """Return the loaders of all processes that have delivered anything, each name once; the busiest first."""
    named: dict[str, list[LoaderRecord]] = {}
    for record in records:
        for loader in record.loaders:
            if loader.samples:
                named.setdefault(loader.name, []).append(loader)
    return sorted(map(sum_loaders, named.values()), key=lambda one: -one.busy)


def _epochs_text(one: LoaderRecord) -> str:
    """Return how many epochs a loader has begun, and its position in an unfinished last one."""
    epochs = format_count(one.epochs, "epoch")
    if one.epoch_samples >= one.epoch_length:
        return epochs
    return f"{epochs} ({percent(one.epoch_samples, one.epoch_length)} of the last one)"


def _delivered_text(loaders: Sequence[LoaderRecord]) -> str:
    """Return how much the loaders have delivered: in batches where the samples in some of them could not be counted."""
    if any(loader.unmeasured for loader in loaders):
        return format_count(sum(loader.batches for loader in loaders), "batch", "batches")
    return format_count(sum(loader.samples for loader in loaders), "sample")


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
    return max(at_mounts, sum(one.bytes for one in loaders)) if all(loader.bytes for loader in loaders) else at_mounts


def served_by(loaders: Sequence[LoaderRecord], came: MountBytes, peers: float) -> str:
    """Return which sources served the reads; "" where nothing is known. Bytes that never came to a mount were in the
    page cache. came: bytes that came to the mounts; peers: the part of the fetched bytes that came from other nodes."""
    at_mounts = came.memory + came.ssd + came.missed
    known = all(loader.bytes for loader in loaders)
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


def percent(part: float, total: float) -> str:
    """Return a share in percent, such as `12 %`; `<1 %` for a smaller share that is not 0."""
    share = 100 * part / total if total > 0 else 0.0
    return "<1 %" if 0 < share < 1 else f"{min(share, 100):.0f} %"


def print_cause(error: BaseException) -> None:
    """Print why the read failed that ends the program, where the daemon knows. error: the program's last exception."""
    number, path = find_failed_read(error)
    key, _, line = (_request_cause(number, path) if number else "").partition("\n")
    if line:
        _printed_keys.append(key)
        run_record.is_first_to_print(key)  # the helper, which may have said it before the traceback, does not repeat it
        if run_record.is_first_to_print(f"died {key}"):
            channel.print_line(line)


def find_failed_read(error: BaseException) -> tuple[int, str]:
    """Return the errno and the file of the failed read behind an exception; 0 and "" where there is none."""
    one: BaseException | None = error
    for _ in range(MAX_CHAINED):
        if one is None:
            break
        if isinstance(one, OSError):
            text = one.args[0] if one.args and isinstance(one.args[0], str) else ""
            # torch raises a worker's exception anew, with its text alone.
            text_errno = next((number for number in _READ_ERRNOS if f"[Errno {number}]" in text), 0)
            if (number := one.errno or text_errno) in _READ_ERRNOS:
                return number, one.filename if isinstance(one.filename, str) else _path_in(text)
        one = one.__cause__ or one.__context__
    return 0, ""


def _path_in(text: str) -> str:
    """Return the file that the message of an OSError names last; "" where it names none."""
    found = _PATH.findall(text)
    return found[-1] if found else ""


def _request_cause(number: int, path: str) -> str:
    """Return what the daemon knows of a read that failed with errno *number*; "" where it knows nothing, or does not
    answer in time. A process that is no child of the job asks, since it has the needed packages.

    path: "" where the error names no file. A failed read names none; a failed open always names its file.
    """
    mounts, absolute = mount_points(), os.path.abspath(path) if path else ""
    is_of_a_mount = any(absolute.startswith(os.path.join(mount.path, "")) for mount in mounts)
    if not mounts or (path and not is_of_a_mount):
        return ""
    command = channel.launch_command("why", str(number), channel.job_name())
    try:
        output = channel.run_detached(command, os.environ, (), EXIT_SECONDS)
    except ImportError:  # a child would have the job's handler of SIGCHLD run
        return ""
    return (output or b"").decode(errors="replace").strip()


def print_summary(top: str) -> None:
    """Print the summary. top: the number of this process. Raises nothing but KeyboardInterrupt."""
    directory = os.environ.get(run_record.RUN_VARIABLE, "")
    with suppress_own(Exception):  # no failure here may change how the job ends
        if not run_record.is_quiet():
            found = summary_lines(_final_records(directory, top), _printed_keys)
            if not found and channel.has_read_no_mount():
                found = [_NO_MOUNT]
            channel.print_last_helper_lines()
            if found and type(sys.stdout) is io.TextIOWrapper:
                _flush_stdout()
            for line in found:
                channel.print_line(line)
    if os.path.basename(directory).split("-")[1:2] == [top]:
        run_record.remove_run(directory)


def _final_records(directory: str, top: str) -> list[ProcessRecord]:
    """Return the records of the run's processes, once they are final or EXIT_SECONDS have passed."""
    found: list[ProcessRecord] = []
    for _ in range(round(EXIT_SECONDS / _PAUSE)):
        found = [record for record in run_record.read_records(directory) if record.top == top]
        expected = channel.has_published() and all(record.pid != os.getpid() for record in found)
        if not expected and not any(record.is_awaited for record in found):
            break
        select.select((), (), (), _PAUSE)  # the job may have replaced clocks and `sleep` by some that stand still
    return [_mark_incomplete(record) for record in found]


def _flush_stdout() -> None:
    """Flush the job's own output first, where its reader takes it at once: Python flushes the rest later."""
    if is_writable_now(sys.stdout.fileno()):
        with suppress_own(OSError), without_sigpipe():
            sys.stdout.flush()


def _mark_incomplete(record: ProcessRecord) -> ProcessRecord:
    if record.is_final:
        return record
    return run_record.with_problem(
        record, f"no answer within {EXIT_SECONDS:.0f} s" if record.is_awaited else "its helper has ended"
    )
