"""Finds why a read has failed (see cachefs.publishing.exit_summary).

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
from cachefs.publishing.transport import DaemonTransport
from cachefs.rpc import JOB_SHOW, STATUS, DaemonClient
from cachefs.socket_path import refusal_reason, socket_path
from cachefs.trouble_texts import (
    SEE_ERRORS,
    Cause,
    cause_of_errno,
    describe_past,
    describe_trouble,
    filter_by_snapshots,
    is_failing,
    trouble_key,
)

# Timeout of calls to the daemon in seconds, and maximum age of a failure of the program.
TIMEOUT: Final = 2.0
RECENT_SECONDS: Final = 120.0
# A failure of the last JUST_NOW_SECONDS is the program's. Without one, the daemon, which looks for troubles
# once a second, is asked again for REQUEST_SECONDS.
JUST_NOW_SECONDS: Final = 1.5
REQUEST_SECONDS: Final = 2.0
_PAUSE: Final = 0.2


def main(number: str, job: str, output: str) -> None:
    """Write the key of the trouble and its text, a line each, to the descriptor *output*; nothing where the daemon
    knows none. number: the errno of the read; job: the program's."""
    line = explain_failure(int(number), job)
    if line:
        os.write(int(output), line.encode(errors="replace")[: select.PIPE_BUF])


def explain_failure(number: int, job: str) -> str:
    """Return the key of a trouble (see `TroubleRecord`) and its line, or "". number: the read's errno; job: its
    name."""
    client = DaemonClient(socket_path())
    began = clock.since_1970()
    while True:
        view = _job_view(client, job)
        found = _latest_cause(view.troubles, number) if view is not None else None
        if found is None and not refusal_reason(client.socket):
            of_node = _node_troubles(client)
            found = _latest_cause(
                of_node if view is None else filter_by_snapshots(of_node, view.snapshot.split(",")), number
            )
        now = clock.since_1970()
        if (found is not None and found.last >= began - JUST_NOW_SECONDS) or now > began + REQUEST_SECONDS:
            break
        select.select((), (), (), _PAUSE)
    if found is None:
        return ""
    key = trouble_key(found)
    if is_failing(found.cause):
        return f"{key}\n{describe_past(found, 0.0)}"
    return f"{key}\n{describe_trouble(found, now)}; {SEE_ERRORS}"


def _job_view(client: DaemonClient, job: str) -> JobView | None:
    try:
        return DaemonTransport(client).call(JOB_SHOW, JobName(job=job), TIMEOUT)
    except CachefsError:  # a program that has published nothing is no job
        return None


def _node_troubles(client: DaemonClient) -> list[Trouble]:
    try:
        return client.call(STATUS, Empty(), TIMEOUT).troubles
    except CachefsError:
        return []


def _latest_cause(troubles: Sequence[Trouble], number: int) -> Trouble | None:
    """Return the latest trouble that made a read fail with the errno *number*, counting this read, which the daemon may
    not have attributed to the program yet. Other datasets may have failed earlier."""
    now = clock.since_1970()
    failing = [trouble for trouble in troubles if is_failing(trouble.cause) and now - trouble.last < RECENT_SECONDS]
    fitting = (one for one in failing if one.cause == cause_of_errno(number))
    found = max(fitting, key=lambda one: one.last, default=None)
    if found is None and cause_of_errno(number) == Cause.FAILED:
        return next((trouble for trouble in troubles if trouble.cause == Cause.ORIGIN), None)
    return found and msgspec.structs.replace(found, failed=max(found.failed, 1))
