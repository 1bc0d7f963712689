"""How a command ends that has started processes and mounts: with nothing left, and with one line where it failed."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

from cachefs.errors import CachefsError

FAILED: Final = 1
INTERRUPTED: Final = 130


@contextmanager
def orderly_exit(program: str) -> Iterator[None]:
    """Run the block. A failure or an interruption ends the program with one line on standard error.

    SIGINT and SIGTERM raise KeyboardInterrupt in the block, once. Later signals are ignored, since cleaning up must not
    be disturbed; all of it has deadlines.
    """
    for handled in (signal.SIGINT, signal.SIGTERM):
        signal.signal(handled, _interrupt)
    try:
        yield
    except (CachefsError, OSError) as error:
        click.echo(f"{program}: {error}", err=True)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        click.echo(f"{program}: interrupted; nothing is left mounted or running", err=True)
        sys.exit(INTERRUPTED)


def _interrupt(number: int, frame: object) -> None:
    for handled in (signal.SIGINT, signal.SIGTERM):
        signal.signal(handled, signal.SIG_IGN)
    raise KeyboardInterrupt
