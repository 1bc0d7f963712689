"""`cachefs run`: runs a command so that torch's DataLoaders are watched in its Python processes, and no more."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from cachefs.preload import preloaded
from cachefs.publishing.channel import JOB_VARIABLE, PYTHON_VARIABLE, job_name
from cachefs.socket_path import SOCKET_VARIABLE, absolute

STARTUP: Final = Path(__file__).parent / "hooks" / "startup"
# With these names ends the directory of every installation of cachefs.
_ENDING: Final = STARTUP.parts[-3:]
# Exit status for a command that does not exist, and for one that cannot be run, as of every shell.
NOT_FOUND: Final = 127
NOT_RUN: Final = 126
# For an option that there is not, or whose value makes no sense.
USAGE: Final = 2


def environment(
    given: Mapping[str, str], command: Sequence[str], job: str | None, socket: str | None
) -> dict[str, str]:
    """The environment *given*, with what makes *command* publish as *job* to the daemon at *socket*.

    Inside another `cachefs run`, the job stays the same, and the directory of the other one leaves PYTHONPATH.
    """
    changed = {
        "PYTHONPATH": _python_path(given.get("PYTHONPATH", "")),
        PYTHON_VARIABLE: sys.executable,
        JOB_VARIABLE: job or job_name(command),
    }
    if socket:
        changed[SOCKET_VARIABLE] = absolute(socket)
    return {**given, **changed, **preloaded(given, command)}


def _python_path(given: str) -> str:
    """PYTHONPATH with our directory in front. All else stays as it is: an empty entry means the current directory."""
    others = [path for path in given.split(os.pathsep) if Path(path).parts[-len(_ENDING) :] != _ENDING]
    return os.pathsep.join([str(STARTUP), *others]) if others != [""] else str(STARTUP)


def run(command: Sequence[str], job: str | None, socket: str | None) -> int:
    """Become *command*, so that signals, terminal and exit status are its own.

    Returns only where it cannot be run, with the exit status.
    """
    if socket and not _is_there(socket):
        print(f"cachefs: there is no socket {socket}: --socket names that of a running cachefsd", file=sys.stderr)
        return USAGE
    changed = environment(os.environ, command, job, socket)
    try:
        if not command[0]:
            raise FileNotFoundError
        os.execvpe(command[0], list(command), changed)
    except FileNotFoundError:
        if command[0].startswith("-"):
            print(f"cachefs: no such option: {command[0]}; see `cachefs run --help`", file=sys.stderr)
            return USAGE
        print(f"cachefs: {command[0] or 'an empty name'}: no such command", file=sys.stderr)
        return NOT_FOUND
    except OSError as error:
        print(f"cachefs: {command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return NOT_RUN


def _is_there(path: str) -> bool:
    """Is something there? One that nobody may look at counts."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True
