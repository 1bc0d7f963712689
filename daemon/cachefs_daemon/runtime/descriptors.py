"""Raises the limit on the daemon's open files.

Each snapshot takes a descriptor, each segment and connection one more. The usual soft limit, 1,024, is meant for
programs that use select(2); the hard one is far higher.
"""

import asyncio
import errno
import logging
import resource
from typing import Any, Final

from cachefs_daemon.runtime.error_log import ErrorLog

log = logging.getLogger(__name__)

# Largest limit that is set: with a limit of a billion, programs that close all descriptors one by one take minutes.
WANTED_LIMIT: Final = 1 << 20


def raise_limit() -> None:
    """Raise the soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(WANTED_LIMIT, hard) if hard != resource.RLIM_INFINITY else WANTED_LIMIT
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of %d open files cannot be raised to %d: %s", soft, wanted, error)


def open_file_limit() -> int:
    """Return the number of files that may be open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED_LIMIT if soft == resource.RLIM_INFINITY else soft


def report_shortage(loop: asyncio.AbstractEventLoop, errors: ErrorLog) -> None:
    """Add an entry to *errors* where connections cannot be accepted, instead of asyncio's tracebacks."""

    def handle(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            errors.add(
                "open files",
                f"new connections of mounts and commands wait: {error.strerror}, with a limit of {open_file_limit()}; "
                "raise the hard limit (LimitNOFILE, ulimit -n)",
            )
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
