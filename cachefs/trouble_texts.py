"""Texts about a node's troubles (cachefs.messages.Trouble), the same ones everywhere.

The daemon finds troubles. cachectl, the web page, the helper of a job and its summary show them with the functions of
this module, so that a user reads one text for one trouble everywhere.
"""

import errno
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

from cachefs.errors import REMOUNT_HINT
from cachefs.formatting import format_count, format_duration
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
    # Reads have waited for seconds for another node, which is not away.
    SLOW_PEER = "slow-peer"
    # A tier takes no new blocks, or fewer than it should.
    TIER = "tier"
    # A job gets less than it wants of a server, since the server does not give what all jobs want.
    SHARE = "share"


# Order of display: first the causes for which reads wait or fail.
DISPLAY_ORDER: Final = (
    Cause.ORIGIN, Cause.REFUSED, Cause.CHANGED, Cause.FAILED, Cause.SLOT, Cause.SLOW,
    Cause.SLOW_PEER, Cause.SHARE, Cause.TIER, Cause.PEER,
)  # fmt: skip
# A short text for each, for a column of a table.
SHORT_TEXTS: Final = {
    Cause.ORIGIN: "no answer",
    Cause.SLOT: "a slot",
    Cause.SLOW: "slow origin",
    Cause.REFUSED: "refused",
    Cause.CHANGED: "changed",
    Cause.FAILED: "failed",
    Cause.PEER: "peer away",
    Cause.SLOW_PEER: "slow peer",
    Cause.TIER: "tier full",
    Cause.SHARE: "its share",
}
_FAILING_CAUSES: Final = (Cause.REFUSED, Cause.CHANGED, Cause.FAILED)
_CAUSES: Final = {errno.EACCES: Cause.REFUSED, errno.EPERM: Cause.REFUSED, errno.ESTALE: Cause.CHANGED}
SEE_ERRORS: Final = "see `cachectl errors`"


def cause_of_errno(number: int) -> Cause:
    """Return the cause of reads that fail with this errno."""
    return _CAUSES.get(number, Cause.FAILED)


def trouble_key(trouble: Trouble) -> str:
    """Return the key of a trouble in a run (see cachefs.publishing.run_record.TroubleRecord)."""
    return f"{trouble.cause} {trouble.subject}"


def describe_trouble(trouble: Trouble, now: float) -> str:
    """Return one line on the problem, its duration and the waiting reads. now: unix time in seconds."""
    for_how_long = format_duration(now - trouble.since)
    because = f" ({trouble.reason})" if trouble.reason else ""
    match trouble.cause:
        case Cause.ORIGIN if trouble.waiting:
            waiting = _describe_waiting(trouble, "for it")
            return f"{trouble.subject} has not answered for {for_how_long}; {waiting}{because}"
        case Cause.ORIGIN:
            elapsed = format_duration(now - trouble.last)
            return f"{trouble.subject} did not answer the last request, {elapsed} ago; no read waits for it{because}"
        case Cause.SLOT:
            return f"{_describe_waiting(trouble, f'for a free request to {trouble.subject}')}{because}"
        case Cause.SLOW:
            return f"{_describe_waiting(trouble, f'for {trouble.subject}, which is slow')}{because}"
        case Cause.REFUSED | Cause.CHANGED | Cause.FAILED:
            if trouble.waiting and not trouble.failed:
                return f"{_describe_waiting(trouble, f'for {trouble.subject}')}{because}"
            return f"{describe_failures(trouble)} (the last {format_duration(now - trouble.last)} ago)"
        case Cause.PEER:
            waiting = f"; {_describe_waiting(trouble, 'for it')}" if trouble.waiting else ""
            return (
                f"node {trouble.subject} has not answered for {for_how_long}{waiting}; its blocks come from other "
                f"nodes or the origin{because}"
            )
        case Cause.SLOW_PEER:
            waiting = _describe_waiting(trouble, f"for node {trouble.subject}")
            return f"{waiting}; it is not away, and may be waiting for its origin{because}"
        case Cause.TIER:
            return f"the {trouble.subject} tier {trouble.reason}"
        case Cause.SHARE:
            return f"{trouble.subject} has been over-subscribed for {for_how_long}: {trouble.reason}"
        case _:  # of a newer daemon
            return f"{trouble.subject}: {trouble.reason or trouble.cause}"


def _describe_waiting(trouble: Trouble, for_what: str) -> str:
    if trouble.waiting == 1:
        return f"1 read waits {for_what}, for {format_duration(trouble.longest)}"
    return f"{format_count(trouble.waiting, 'read')} wait {for_what}, the first for {format_duration(trouble.longest)}"


def describe_failures(trouble: Trouble) -> str:
    """Return the number of failed reads of a dataset, with the reason; where it is 0, only readahead has failed."""
    own = trouble.failed - trouble.unattributed
    what = f"{format_count(own, 'read')} of {trouble.subject}" if own else f"readahead of {trouble.subject}"
    if trouble.unattributed and own:
        what += f", and {trouble.unattributed:,} more on this node that may be another job's,"
    elif trouble.unattributed:
        what = f"{format_count(trouble.unattributed, 'read')} of {trouble.subject} on this node, maybe another job's,"
    return f"{what} failed: {trouble.reason}"


def remedy(trouble: Trouble) -> str:
    """Return one line on what helps."""
    match trouble.cause:
        case Cause.ORIGIN:
            return (
                "check that the server runs and that this machine can reach it; reads continue when the server answers"
            )
        case Cause.SLOT:
            return "wait, or raise origin.max_connections if the server takes more requests at once"
        case Cause.SLOW:
            return "see the server and the network; `cachectl doctor DATASET` measures it"
        case Cause.REFUSED:
            # Archived objects, closed accounts and files of another owner are refused too. The reason tells what helps.
            return f"fix the cause that the reason names, then check with `cachectl doctor {trouble.subject}`"
        case Cause.CHANGED if REMOUNT_HINT in trouble.reason:
            return REMOUNT_HINT
        case Cause.CHANGED:
            return f"cachectl dataset refresh {trouble.subject}"
        case Cause.PEER:
            return "see `cachectl cluster`, and the daemon of that node"
        case Cause.SLOW_PEER:
            return f"see `cachectl status` on node {trouble.subject}, which names what it waits for"
        case Cause.TIER:
            return "make room on the disk, or give the tier another one; see `cachectl status`"
        case Cause.SHARE:
            return "wait, or change the shares with `cachectl job priority`"
        case _:
            return SEE_ERRORS


def short_text(troubles: Sequence[Trouble]) -> str:
    """Return a short text for the worst trouble, for a column of a table."""
    first = next(iter(troubles), None)
    return (
        "-"
        if first is None
        else SHORT_TEXTS.get(Cause(first.cause), "-")
        if first.cause in DISPLAY_ORDER
        else first.cause
    )


def describe_consequence(trouble: Trouble) -> str:
    """Return one line on the consequence."""
    match trouble.cause:
        case Cause.TIER:
            return "the tier takes no new blocks, so more blocks are fetched again"
        case Cause.PEER:
            return "blocks of that node are fetched from other nodes, or again from the origin"
        case Cause.SHARE:
            return "the job reads as fast as its share of the server's bytes comes"
        case Cause.ORIGIN if not trouble.waiting:
            return "blocks that are not on this node cannot be read until the server answers"
        case _ if trouble.waiting:
            return "programs wait until their reads are answered, or fail when daemon.read_deadline is over"
        case _:
            return "reads of the affected files fail"


def describe_end(trouble: Trouble, now: float) -> str:
    """Return one line for the end of the trouble."""
    lasted = format_duration(now - trouble.since)
    match trouble.cause:
        case Cause.ORIGIN:
            return f"{trouble.subject} answers again, after {lasted}"
        case Cause.PEER:
            return f"node {trouble.subject} answers again, after {lasted}"
        case Cause.TIER:
            return f"the {trouble.subject} tier takes blocks again, after {lasted}"
        case Cause.SLOT | Cause.SLOW:
            return f"reads of {trouble.subject} continue, after {lasted}"
        case Cause.SLOW_PEER:
            return f"reads from node {trouble.subject} continue, after {lasted}"
        case Cause.SHARE:
            return f"{trouble.subject} gives what the job wants again, after {lasted}"
        case _:
            return ""  # reads that have failed stay so


def describe_past(trouble: Trouble, seconds: float) -> str:
    """Return one line of a summary: the problem, and its duration."""
    lasted, subject = format_duration(seconds), trouble.subject
    match trouble.cause:
        case Cause.ORIGIN:
            return f"{subject} did not answer for {lasted}"
        case Cause.PEER:
            return f"node {subject} did not answer for {lasted}"
        case Cause.TIER:
            return f"the {subject} tier {trouble.reason}"
        case Cause.SLOT:
            return f"reads waited for {lasted} for a free request to {subject}"
        case Cause.SLOW:
            return f"reads waited for {lasted} for {subject}, which answered slowly"
        case Cause.SLOW_PEER:
            return f"reads waited for {lasted} for node {subject}, which answered slowly"
        case Cause.SHARE:
            return f"{subject} did not give what all jobs wanted for {lasted}"
        case _:
            return f"{describe_failures(trouble)}; {SEE_ERRORS}"


def is_delaying(cause: str) -> bool:
    """Return whether reads wait because of the trouble, so that a job has waited for as long as it lasted."""
    return cause in (Cause.ORIGIN, Cause.SLOT, Cause.SLOW, Cause.SLOW_PEER, Cause.SHARE)


def is_failing(cause: str) -> bool:
    """Return whether reads fail because of the trouble."""
    return cause in _FAILING_CAUSES


def sort_by_severity(troubles: Iterable[Trouble]) -> list[Trouble]:
    """Return the troubles, the worst first: those for which reads wait, then those that make reads fail."""

    def rank(one: Trouble) -> tuple[bool, int, float]:
        position = DISPLAY_ORDER.index(Cause(one.cause)) if one.cause in DISPLAY_ORDER else len(DISPLAY_ORDER)
        return (not one.waiting and not is_failing(one.cause), position, one.since)

    return sorted(troubles, key=rank)


def filter_by_snapshots(troubles: Iterable[Trouble], snapshots: Sequence[str]) -> list[Trouble]:
    """Return the troubles that concern reads of these snapshots."""
    return [one for one in troubles if not one.snapshots or any(each in one.snapshots for each in snapshots)]
