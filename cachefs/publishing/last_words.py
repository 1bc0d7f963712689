"""The summary of a run, printed by its first Python process as that ends.

It never waits longer than SECONDS, and whatever goes wrong, the job ends as it would have.
"""

import io
import os
import select
import sys
from typing import Final

from cachefs.publishing import channel, run_record, summary
from cachefs.publishing.foreign import suppress_own
from cachefs.publishing.run_record import ProcessRecord
from cachefs.publishing.stderr import takes_at_once, without_sigpipe

# Seconds that the end of the job may take longer.
SECONDS: Final = 1.0
_PAUSE: Final = 0.01


def say(top: str) -> None:
    """Print the summary. top: the number of this process. Raises nothing but KeyboardInterrupt."""
    directory = os.environ.get(run_record.RUN_VARIABLE, "")
    with suppress_own(Exception):  # no failure here may change how the job ends
        if not run_record.is_quiet():
            found = summary.lines(_records(directory, top))
            channel.hear_last()
            if found and type(sys.stdout) is io.TextIOWrapper:
                _flush_stdout()
            for line in found:
                channel.say(line)
    if os.path.basename(directory).split("-")[1:2] == [top]:
        run_record.remove(directory)


def _records(directory: str, top: str) -> list[ProcessRecord]:
    """What the processes of the run have left, once that is final."""
    found: list[ProcessRecord] = []
    for _ in range(round(SECONDS / _PAUSE)):
        found = [record for record in run_record.read_all(directory) if record.top == top]
        expected = channel.has_published() and all(record.pid != os.getpid() for record in found)
        if not expected and all(record.is_final for record in found):
            return found
        select.select((), (), (), _PAUSE)  # the job may have replaced clocks and `sleep` by some that stand still
    return [_doubtful(record) for record in found]


def _flush_stdout() -> None:
    """What the job has printed comes first, where its reader takes it at once: Python writes the rest after this."""
    if takes_at_once(sys.stdout.fileno()):
        with suppress_own(OSError), without_sigpipe():
            sys.stdout.flush()


def _doubtful(record: ProcessRecord) -> ProcessRecord:
    if record.is_final:
        return record
    return run_record.with_problem(record, f"no answer within {SECONDS:.0f} s")
