"""Ownership of jobs.

A job's full name consists of the name that its user gave it and a mark of that user, so that no user can replace, end
or block another's job.
"""

import os
from collections.abc import Iterable

from cachefs.errors import AccessDenied, ConfigError, NotFound
from cachefs.identity import OWNER_MARK, UNKNOWN_OWNER
from cachefs.planning.requests.shares import MAX_WEIGHT, MIN_WEIGHT
from cachefs_daemon.caller import Caller


def own_job_name(caller: Caller, name: str) -> str:
    """Return the full name of *caller*'s own job *name*. Raises ConfigError."""
    if OWNER_MARK in name:
        raise ConfigError(f"{name!r} cannot name a job: use 1 to 128 of A-Z a-z 0-9 . _ : @ + -")
    return name if caller.is_daemon else name + _suffix(caller)


def find_job_name(caller: Caller, name: str, known: Iterable[str]) -> str:
    """Return the full name of the job that *caller* means by *name*: its own one, else the only one with that name.

    known: full names of all jobs. Raises NotFound, and ConfigError where several users have one.
    """
    called = [one for one in known if name in (one, name_without_owner(one))]
    if not called:
        raise no_such_job_error(name)
    if OWNER_MARK in name:
        return name
    own = own_job_name(caller, name)
    if own in called:
        return own
    if len(called) > 1 and name not in called:
        raise ConfigError(f"several users have a job {name!r}; name one of {', '.join(sorted(called))}")
    return name if name in called else called[0]


def check_owner(caller: Caller, job: str) -> None:
    """Raise AccessDenied where the job of that full name belongs to another user and *caller* is no administrator."""
    if not caller.is_administrator and job != own_job_name(caller, name_without_owner(job)):
        raise AccessDenied(f"job {job} is another user's; only that user and administrators of the daemon may do that")


def check_weight(caller: Caller, job: str, weight: float) -> None:
    """Raise ConfigError for a weight that no job may have, AccessDenied for one above 1 where *caller* is no
    administrator: it would take from the jobs of others."""
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ConfigError(
            f"job {name_without_owner(job)}: weight {weight:g}: expected {MIN_WEIGHT:g} to {MAX_WEIGHT:g}; 1 is usual"
        )
    if weight > 1 and not caller.is_administrator:
        raise AccessDenied(
            f"job {name_without_owner(job)}: only administrators of the daemon may set a weight above 1, which takes "
            "from the jobs of others"
        )


def name_without_owner(job: str) -> str:
    """Return the name that the user gave the job of that full name. Messages to the user contain this one."""
    return job.partition(OWNER_MARK)[0]


def no_such_job_error(name: str) -> NotFound:
    return NotFound(
        f"no job named {name!r} has published anything here; see `cachectl job list`, and `cachectl sched queue` for "
        "jobs that wait to begin"
    )


def owner_of(job: str) -> str:
    """Return the owner part of a full name; "" for the user that the daemon runs as."""
    return job.partition(OWNER_MARK)[2]


def owner_text(owner: str) -> str:
    """Return the owner, as `owner_of` gives it, for messages."""
    return "control files" if owner == UNKNOWN_OWNER else f"user {owner}"


def user_of(job: str) -> int | None:
    """Return the user id of the owner of the job of that full name; None where unknown."""
    owner = owner_of(job)
    if not owner:
        return os.geteuid()
    return int(owner) if owner.isdecimal() else None


def _suffix(caller: Caller) -> str:
    return f"{OWNER_MARK}{caller.uid if caller.uid >= 0 else UNKNOWN_OWNER}"
