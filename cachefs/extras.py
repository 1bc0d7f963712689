"""Commands whose packages may not be installed: each comes with an extra of the distribution."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Final

_OWN: Final = ("cachefs", "cachefs_daemon", "cachefs_tools")
USAGE: Final = 2


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
        way_out = f"pip install 'cachefs[{extra}]'"
        print(f"{command}: {missing} is not installed; install it with: {way_out}", file=sys.stderr)
        sys.exit(USAGE)
