"""Texts about a node's troubles (cachefs.messages.Trouble), the same ones everywhere.

The daemon finds troubles. cachectl, the web page, the helper of a job and its summary show them with the functions of
this module, so that a user reads one text for one trouble everywhere.
"""

import errno
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

from cachefs.counts import counted, duration
from cachefs.errors import MOUNT_AGAIN
from cachefs.messages import Trouble


class Cause(StrEnum):
    """The kind of a trouble."""

    # A server of datasets does not answer.
    ORIGIN = "origin"
    # Reads wait until the server may be sent one more request.
    SLOT = "slot"
    # Reads have waited for seconds, while the server answers other requests.
    SLOW = "slow"
    # The server, or the file system, refuses the daemon's reads: for credentials, the object's state, or else.
    REFUSED = "refused"
    # An object differs from the listed one.
    CHANGED = "changed"
    # Reads fail for another reason.
    FAILED = "failed"
    # Another node of the cluster does not answer.
    PEER = "peer"
    # A tier takes no new blocks, or fewer than it should.
    TIER = "tier"


# Order of display: first the causes for which reads wait or fail.
ORDER: Final = (
    Cause.ORIGIN, Cause.REFUSED, Cause.CHANGED, Cause.FAILED, Cause.SLOT, Cause.SLOW, Cause.TIER, Cause.PEER,
)  # fmt: skip
# A short text for each, for a column of a table.
SHORT: Final = {
    Cause.ORIGIN: "no answer",
    Cause.SLOT: "a slot",
    Cause.SLOW: "slow origin",
    Cause.REFUSED: "refused",
    Cause.CHANGED: "changed",
    Cause.FAILED: "failed",
    Cause.PEER: "peer away",
    Cause.TIER: "tier full",
}
_FAILING: Final = (Cause.REFUSED, Cause.CHANGED, Cause.FAILED)
_CAUSES: Final = {errno.EACCES: Cause.REFUSED, errno.EPERM: Cause.REFUSED, errno.ESTALE: Cause.CHANGED}
SEE_ERRORS: Final = "see `cachectl errors`"


def cause_of(number: int) -> Cause:
    """Return the cause of reads that fail with this errno."""
    return _CAUSES.get(number, Cause.FAILED)


def key_of(one: Trouble) -> str:
    """Return the key of a trouble in a run (see cachefs.publishing.run_record.TroubleRecord)."""
    return f"{one.cause} {one.subject}"


def words(one: Trouble, now: float) -> str:
    """Return one line on the problem, its duration and the waiting reads. now: unix time in seconds."""
    for_how_long = duration(now - one.since)
    because = f" ({one.reason})" if one.reason else ""
    match one.cause:
        case Cause.ORIGIN if one.waiting:
            return f"{one.subject} has not answered for {for_how_long}; {_waiting(one, 'for it')}{because}"
        case Cause.ORIGIN:
            asked = duration(now - one.last)
            return f"{one.subject} did not answer when it was last asked, {asked} ago; no read waits for it{because}"
        case Cause.SLOT:
            return f"{_waiting(one, f'for a free request to {one.subject}')}{because}"
        case Cause.SLOW:
            return f"{_waiting(one, f'for {one.subject}, which is slow')}{because}"
        case Cause.REFUSED | Cause.CHANGED | Cause.FAILED:
            if one.waiting and not one.failed:
                return f"{_waiting(one, f'for {one.subject}')}{because}"
            return f"{failed_words(one)} (the last {duration(now - one.last)} ago)"
        case Cause.PEER:
            waiting = f"; {_waiting(one, 'for it')}" if one.waiting else ""
            return (
                f"node {one.subject} has not answered for {for_how_long}{waiting}; its blocks come from other nodes or "
                f"the origin{because}"
            )
        case Cause.TIER:
            return f"the {one.subject} tier {one.reason}"
        case _:  # of a newer daemon
            return f"{one.subject}: {one.reason or one.cause}"


def _waiting(one: Trouble, for_what: str) -> str:
    if one.waiting == 1:
        return f"1 read waits {for_what}, for {duration(one.longest)}"
    return f"{counted(one.waiting, 'read')} wait {for_what}, the first for {duration(one.longest)}"


def failed_words(one: Trouble) -> str:
    """Return the number of failed reads of a dataset, with the reason; where it is 0, only readahead has failed."""
    own = one.failed - one.unattributed
    what = f"{counted(own, 'read')} of {one.subject}" if own else f"what was fetched ahead of {one.subject}"
    if one.unattributed and own:
        what += f", and {one.unattributed:,} more on this node that may be another job's,"
    elif one.unattributed:
        what = f"{counted(one.unattributed, 'read')} of {one.subject} on this node, maybe another job's,"
    return f"{what} failed: {one.reason}"


def way_out(one: Trouble) -> str:
    """Return one line on what helps."""
    match one.cause:
        case Cause.ORIGIN:
            return "see whether the server runs and whether this machine reaches it; reads go on when it answers"
        case Cause.SLOT:
            return "wait, or raise origin.max_connections if the server takes more requests at once"
        case Cause.SLOW:
            return "see the server and the network; `cachectl doctor DATASET` measures it"
        case Cause.REFUSED:
            # Archived objects, closed accounts and files of another owner are refused too. The reason tells what helps.
            return f"do what the reason names, then try it with `cachectl doctor {one.subject}`"
        case Cause.CHANGED if MOUNT_AGAIN in one.reason:
            return MOUNT_AGAIN
        case Cause.CHANGED:
            return f"cachectl dataset refresh {one.subject}"
        case Cause.PEER:
            return "see `cachectl cluster`, and the daemon of that node"
        case Cause.TIER:
            return "make room on the disk, or give the tier another one; see `cachectl status`"
        case _:
            return SEE_ERRORS


def short(troubles: Sequence[Trouble]) -> str:
    """Return a short text for the worst trouble, for a column of a table."""
    first = next(iter(troubles), None)
    return "-" if first is None else SHORT.get(Cause(first.cause), "-") if first.cause in ORDER else first.cause


def consequence(one: Trouble) -> str:
    """Return one line on the consequence."""
    match one.cause:
        case Cause.TIER:
            return "it takes no new blocks, so more is fetched again"
        case Cause.PEER:
            return "what that node keeps is fetched from other nodes, or from the origin once more"
        case Cause.ORIGIN if not one.waiting:
            return "what is not on this node cannot be read until the server answers"
        case _ if one.waiting:
            return "programs wait until their reads are answered, or fail when daemon.read_deadline is over"
        case _:
            return "programs get errors where they read it"


def over_words(one: Trouble, now: float) -> str:
    """Return one line for the end of the trouble."""
    lasted = duration(now - one.since)
    match one.cause:
        case Cause.ORIGIN:
            return f"{one.subject} answers again, after {lasted}"
        case Cause.PEER:
            return f"node {one.subject} answers again, after {lasted}"
        case Cause.TIER:
            return f"the {one.subject} tier takes blocks again, after {lasted}"
        case Cause.SLOT | Cause.SLOW:
            return f"reads of {one.subject} go on, after {lasted}"
        case _:
            return ""  # reads that have failed stay so


def past_words(one: Trouble, seconds: float) -> str:
    """Return one line of a summary: the problem, and its duration."""
    lasted, subject = duration(seconds), one.subject
    match one.cause:
        case Cause.ORIGIN:
            return f"{subject} did not answer for {lasted}"
        case Cause.PEER:
            return f"node {subject} did not answer for {lasted}"
        case Cause.TIER:
            return f"the {subject} tier {one.reason}"
        case Cause.SLOT:
            return f"reads waited for {lasted} for a free request to {subject}"
        case Cause.SLOW:
            return f"reads waited for {lasted} for {subject}, which answered slowly"
        case _:
            return f"{failed_words(one)}; {SEE_ERRORS}"


def is_of_reads(cause: str) -> bool:
    """Return whether reads wait because of the trouble, so that a job has waited for as long as it lasted."""
    return cause in (Cause.ORIGIN, Cause.SLOT, Cause.SLOW)


def is_failing(cause: str) -> bool:
    """Return whether reads fail because of the trouble."""
    return cause in _FAILING


def ordered(troubles: Iterable[Trouble]) -> list[Trouble]:
    """Return the troubles, the worst first: those for which reads wait, then those that make reads fail."""

    def rank(one: Trouble) -> tuple[bool, int, float]:
        place = ORDER.index(Cause(one.cause)) if one.cause in ORDER else len(ORDER)
        return (not one.waiting and not is_failing(one.cause), place, one.since)

    return sorted(troubles, key=rank)


def concerning(troubles: Iterable[Trouble], snapshots: Sequence[str]) -> list[Trouble]:
    """Return the troubles that concern reads of these snapshots."""
    return [one for one in troubles if not one.snapshots or any(each in one.snapshots for each in snapshots)]
