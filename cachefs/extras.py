"""The distribution's extras: what some commands need besides, and what is said where it is not installed."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Final

# Its name on PyPI. The import package `cachefs` is named otherwise, since that name belongs to somebody else there.
DISTRIBUTION: Final = "cachefsd"
USAGE: Final = 2
_OWN: Final = ("cachefs", "cachefs_daemon", "cachefs_scheduler", "cachefs_tools")


def way_out(extra: str) -> str:
    """The command that installs an extra, as the end of a message."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


@contextlib.contextmanager
def needs_extra(extra: str, command: str) -> Iterator[None]:
    """For the imports of a command: where a package of the *extra* is not installed, say in one line how to install it,
    and end the process."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing in _OWN:
            raise
        print(f"{command}: {missing} is not installed; install it with: {way_out(extra)}", file=sys.stderr)
        sys.exit(USAGE)
