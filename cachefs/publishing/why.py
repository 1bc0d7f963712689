"""Says why a read has failed (see cachefs.publishing.last_words).

A training process that dies runs this module in a process beside it, as it runs the helper (launch.py).
"""

import os
import select
from typing import Final

import msgspec

from cachefs.errors import CachefsError
from cachefs.job_messages import JobName
from cachefs.messages import Empty
from cachefs.publishing import clock
from cachefs.publishing.route import Route
from cachefs.rpc import JOB_SHOW, STATUS, DaemonClient
from cachefs.socket_path import refusal, socket_path
from cachefs.troubles import SEE_ERRORS, Cause, cause_of, is_failing, key_of, past_words, words

# Seconds that the daemon has to answer, and for which a failure counts as that of the program.
TIMEOUT: Final = 2.0
RECENT: Final = 120.0


def main(number: str, job: str, output: str) -> None:
    """Writes two lines to the descriptor *output*, the key of the trouble and its text, or nothing where the daemon
    knows nothing. number: the errno of the read; job: the program's."""
    line = why(int(number), job)
    if line:
        os.write(int(output), line.encode(errors="replace")[: select.PIPE_BUF])


def why(number: int, job: str) -> str:
    """Returns the key of a trouble (see `TroubleRecord`) and its line, or "". number: the errno of the read; job: the
    program's."""
    client = DaemonClient(socket_path())
    try:
        if refusal(client.socket):
            troubles = Route(client).call(JOB_SHOW, JobName(job=job), TIMEOUT).troubles
        else:
            # Those of all programs: which of the reads are this one's is not known.
            found = client.call(STATUS, Empty(), TIMEOUT).troubles
            troubles = [msgspec.structs.replace(one, unattributed=one.failed) for one in found]
    except CachefsError:
        return ""
    now = clock.since_1970()
    failing = [one for one in troubles if is_failing(one.cause) and now - one.last < RECENT]
    found = next((one for one in failing if one.cause == cause_of(number)), None)
    if found is None and cause_of(number) == Cause.FAILED:
        found = next((one for one in troubles if one.cause == Cause.ORIGIN), None)
    if found is None:
        return ""
    key = key_of(found)
    if is_failing(found.cause):
        return f"{key}\n{past_words(found, 0.0)}"
    return f"{key}\n{words(found, now)}; {SEE_ERRORS}"
