"""How a command ends that has started processes and mounts: with nothing left, and with one line where it failed."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import click

from cachefs.errors import CachefsError

FAILED: Final = 1
INTERRUPTED: Final = 130
# Seconds after which an interruption is raised again that was lost.
_AGAIN: Final = 0.01


@contextmanager
def orderly_exit(program: str) -> Iterator[None]:
    """Run the block. A failure or an interruption ends the program with one line on standard error.

    SIGINT and SIGTERM raise KeyboardInterrupt in the block, once. Later signals are ignored, since cleaning up must not
    be disturbed; all of it has deadlines.
    """
    for handled in (signal.SIGINT, signal.SIGTERM):
        signal.signal(handled, _interrupt)
    sys.unraisablehook = _raise_again
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


def _raise_again(lost: Any) -> None:
    """Python prints and forgets what is raised in a `__del__`, or in a callback of its own such as that of an import's
    lock. An interruption that comes just then would be forgotten, too."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        signal.signal(signal.SIGINT, _interrupt)
        threading.Timer(_AGAIN, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(lost)
