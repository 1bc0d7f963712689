"""Finds why a read has failed (see cachefs.publishing.last_words).

A dying training process runs this module in a process beside it, started by launch.py like the helper.
"""

import os
import select
from collections.abc import Sequence
from typing import Final

import msgspec

from cachefs.errors import CachefsError
from cachefs.job_messages import JobName, JobView
from cachefs.messages import Empty, Trouble
from cachefs.publishing import clock
from cachefs.publishing.route import Route
from cachefs.rpc import JOB_SHOW, STATUS, DaemonClient
from cachefs.socket_path import refusal, socket_path
from cachefs.troubles import SEE_ERRORS, Cause, cause_of, concerning, is_failing, key_of, past_words, words

# Timeout of calls to the daemon in seconds, and maximum age of a failure of the program.
TIMEOUT: Final = 2.0
RECENT: Final = 120.0
# A failure of the last JUST_NOW seconds is the program's. Without one, the daemon, which looks for troubles once a
# second, is asked again for LOOK_SECONDS.
JUST_NOW: Final = 1.5
LOOK_SECONDS: Final = 2.0
_PAUSE: Final = 0.2


def main(number: str, job: str, output: str) -> None:
    """Write the key of the trouble and its text, a line each, to the descriptor *output*; nothing where the daemon
    knows none. number: the errno of the read; job: the program's."""
    line = why(int(number), job)
    if line:
        os.write(int(output), line.encode(errors="replace")[: select.PIPE_BUF])


def why(number: int, job: str) -> str:
    """Return the key of a trouble (see `TroubleRecord`) and its line, or "". number: the read's errno; job: its
    name."""
    client = DaemonClient(socket_path())
    began = clock.since_1970()
    while True:
        view = _job(client, job)
        found = _cause(view.troubles, number) if view is not None else None
        if found is None and not refusal(client.socket):
            of_node = _of_node(client)
            found = _cause(of_node if view is None else concerning(of_node, view.snapshot.split(",")), number)
        now = clock.since_1970()
        if (found is not None and found.last >= began - JUST_NOW) or now > began + LOOK_SECONDS:
            break
        select.select((), (), (), _PAUSE)
    if found is None:
        return ""
    key = key_of(found)
    if is_failing(found.cause):
        return f"{key}\n{past_words(found, 0.0)}"
    return f"{key}\n{words(found, now)}; {SEE_ERRORS}"


def _job(client: DaemonClient, job: str) -> JobView | None:
    try:
        return Route(client).call(JOB_SHOW, JobName(job=job), TIMEOUT)
    except CachefsError:  # a program that has published nothing is no job
        return None


def _of_node(client: DaemonClient) -> list[Trouble]:
    try:
        return client.call(STATUS, Empty(), TIMEOUT).troubles
    except CachefsError:
        return []


def _cause(troubles: Sequence[Trouble], number: int) -> Trouble | None:
    """Return the latest trouble that made a read fail with the errno *number*, counting this read, which the daemon may
    not have attributed to the program yet. Other datasets may have failed earlier."""
    now = clock.since_1970()
    failing = [one for one in troubles if is_failing(one.cause) and now - one.last < RECENT]
    fitting = (one for one in failing if one.cause == cause_of(number))
    found = max(fitting, key=lambda one: one.last, default=None)
    if found is None and cause_of(number) == Cause.FAILED:
        return next((one for one in troubles if one.cause == Cause.ORIGIN), None)
    return found and msgspec.structs.replace(found, failed=max(found.failed, 1))
