"""Prints the summary of a run, as its first Python process ends.

Printing never takes longer than EXIT_SECONDS, and whatever goes wrong, the job ends as it would have.
"""

import errno
import io
import os
import re
import select
import sys
from typing import Final

from cachefs.mount_table import mount_points
from cachefs.publishing import channel, run_record, summary
from cachefs.publishing.job_exceptions import suppress_own
from cachefs.publishing.run_record import ProcessRecord
from cachefs.publishing.stderr import is_writable_now, without_sigpipe

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


def print_cause(error: BaseException) -> None:
    """Print why the read failed that ends the program, where the daemon knows. error: the program's last exception."""
    number, path = find_failed_read(error)
    key, _, line = (_ask_cause(number, path) if number else "").partition("\n")
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
            said = next((number for number in _READ_ERRNOS if f"[Errno {number}]" in text), 0)
            if (number := one.errno or said) in _READ_ERRNOS:
                return number, one.filename if isinstance(one.filename, str) else _path_in(text)
        one = one.__cause__ or one.__context__
    return 0, ""


def _path_in(text: str) -> str:
    """Return the file that the message of an OSError names last; "" where it names none."""
    found = _PATH.findall(text)
    return found[-1] if found else ""


def _ask_cause(number: int, path: str) -> str:
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
        said = channel.run_detached(command, os.environ, (), EXIT_SECONDS)
    except ImportError:  # a child would have the job's handler of SIGCHLD run
        return ""
    return (said or b"").decode(errors="replace").strip()


def print_summary(top: str) -> None:
    """Print the summary. top: the number of this process. Raises nothing but KeyboardInterrupt."""
    directory = os.environ.get(run_record.RUN_VARIABLE, "")
    with suppress_own(Exception):  # no failure here may change how the job ends
        if not run_record.is_quiet():
            found = summary.summary_lines(_final_records(directory, top), _printed_keys)
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
