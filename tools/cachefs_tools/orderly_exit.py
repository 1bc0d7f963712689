"""How a command ends that has started processes and mounts: with nothing left, and with one line where it failed."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import click

from cachefs.errors import CachefsError

FAILED: Final = 1
INTERRUPTED: Final = 130
# Seconds after which, and then in which intervals, an interruption is raised again that was lost.
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
        signal.signal(signal.SIGALRM, _alarm)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN, _AGAIN)
    else:
        sys.__unraisablehook__(lost)


def _alarm(number: int, frame: FrameType | None) -> None:
    # What is raised before the hook has returned would be forgotten for good.
    if frame is None or frame.f_code is not _raise_again.__code__:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt
