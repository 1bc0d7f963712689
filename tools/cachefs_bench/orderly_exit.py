"""Ends a command that has started processes and mounts: nothing is left, and a failure is reported in one line."""

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
# Seconds after which a lost interruption is raised again, and interval of further attempts.
_RETRY_SECONDS: Final = 0.01


@contextmanager
def orderly_exit(program: str) -> Iterator[None]:
    """Run the block. A failure or an interruption ends the program with one line on standard error.

    SIGINT and SIGTERM raise KeyboardInterrupt in the block, once. Later signals are ignored, since they must not
    disturb the clean-up, whose steps all have deadlines.
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
    """Raise a lost interruption again. Python prints and forgets exceptions raised in a `__del__`, or in a callback of
    its own such as that of an import's lock."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        signal.signal(signal.SIGALRM, _alarm)
        signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS, _RETRY_SECONDS)
    else:
        sys.__unraisablehook__(lost)


def _alarm(number: int, frame: FrameType | None) -> None:
    # An exception raised before the hook has returned would be lost for good.
    if frame is None or frame.f_code is not _raise_again.__code__:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt
