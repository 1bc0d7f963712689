"""`cachefs run`: runs a command so that torch's DataLoaders in its Python processes are watched."""

import contextlib
import os
import re
import shutil
import signal
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from cachefs.mount_table import MountPoint, daemon_sockets, mount_points, resolve_locally
from cachefs.publishing.channel import JOB_VARIABLE, PYTHON_VARIABLE, job_name, slurm_step
from cachefs.publishing.rank import find_rank
from cachefs.publishing.run_record import QUIET_VARIABLE, RUN_VARIABLE, TOP_VARIABLE, is_quiet, make_run_directory
from cachefs.publishing.stderr import write_line
from cachefs.socket_path import SOCKET_VARIABLE, absolute_path, refusal_reason, socket_path

STARTUP_DIRECTORY: Final = Path(__file__).parent / "hooks" / "startup"
# Last parts of the directory of each installation of cachefs.
_STARTUP_SUFFIX: Final = STARTUP_DIRECTORY.parts[-3:]
# Exit statuses of every shell for a command that does not exist, and for one that cannot be run.
NOT_FOUND_EXIT_STATUS: Final = 127
NOT_RUN_EXIT_STATUS: Final = 126
# Exit status for an unknown option or an invalid value.
USAGE_EXIT_STATUS: Final = 2
# Maximum number of bytes examined of a script.
_MAX_SCRIPT_BYTES: Final = 1 << 16
# Matches a line of a shell script that sets PYTHONPATH without its previous value.
_PYTHONPATH_OVERRIDE: Final = re.compile(r"^[^#\n]*?(?<![\w$])PYTHONPATH=(?!.*\$\{?PYTHONPATH)", re.MULTILINE)
# Maximum number of mounts named in a line.
MAX_NAMED_MOUNTS: Final = 3


def command_environment(
    environment: Mapping[str, str], command: Sequence[str], job: str | None, socket: str | None
) -> dict[str, str]:
    """Return *environment*, changed so that *command* publishes as *job* to the daemon at *socket*.

    Inside another `cachefs run`, the job stays the same, and the other installation's directory is removed from
    PYTHONPATH.
    """
    changed = {
        "PYTHONPATH": _python_path(environment.get("PYTHONPATH", "")),
        PYTHON_VARIABLE: sys.executable,
    }
    # In Slurm each step that the command starts is a job of its own, and knows its step.
    if job or environment.get(JOB_VARIABLE) or not environment.get("SLURM_JOB_ID") or slurm_step():
        changed[JOB_VARIABLE] = job or job_name(command)
    if socket:
        changed[SOCKET_VARIABLE] = absolute_path(socket)
    return {**environment, **changed}


def summary_variables(environment: Mapping[str, str], *, quiet: bool) -> dict[str, str]:
    """Return the variables that control whether, and where, the processes of a run collect the final summary.

    Inside another `cachefs run` the outer one prints. Of the ranks started by a launcher, the first one prints.
    """
    if quiet or is_quiet(environment) or (find_rank()[0] or 0) > 0:
        return {QUIET_VARIABLE: "1"}
    return {} if os.path.isdir(environment.get(RUN_VARIABLE, "")) else {RUN_VARIABLE: make_run_directory()}


def _python_path(inherited: str) -> str:
    """Return PYTHONPATH with our directory in front. Keeps all else: an empty entry means the current directory."""
    others = [
        path for path in inherited.split(os.pathsep) if Path(path).parts[-len(_STARTUP_SUFFIX) :] != _STARTUP_SUFFIX
    ]
    return os.pathsep.join([str(STARTUP_DIRECTORY), *others]) if others != [""] else str(STARTUP_DIRECTORY)


def mounts_line(points: Sequence[MountPoint], socket: Path, refusal: str, others: int = 0) -> str:
    """Return the line on the mounted datasets and the daemon.

    points: mounts of this daemon, as far as known; refusal: why its socket cannot be used, or ""; others: number of
    mounts of other daemons.
    """
    if not points:
        where = f"by the daemon at {_printable(socket)} (another daemon has mounts)" if others else "on this machine"
        return f"no dataset is mounted {where}, so nothing is read ahead"
    named = ", ".join(f"{_printable(point.spec)} at {_printable(point.path)}" for point in points[:MAX_NAMED_MOUNTS])
    more = f" and {len(points) - MAX_NAMED_MOUNTS:,} more" if len(points) > MAX_NAMED_MOUNTS else ""
    route = f"through the control files of the mounts, as {refusal}" if refusal else f"at {_printable(socket)}"
    return f"mounted: {named}{more}; daemon: {route}"


def _is_program(name: str) -> bool:
    """Return whether the command exists and may be run. Otherwise that error is the only output."""
    return bool(name) and shutil.which(name) is not None


def sort_named_first(points: Sequence[MountPoint], command: Sequence[str]) -> list[MountPoint]:
    """Return the mounts, first those that contain a path among the arguments of the command."""
    words = [os.path.join(word.rpartition("=")[2], "") for word in command]
    return sorted(points, key=lambda point: not any(word.startswith(os.path.join(point.path, "")) for word in words))


def mounts_of_daemon(points: Sequence[MountPoint], sockets: Mapping[Path, str], socket: Path) -> list[MountPoint]:
    """Return the living mounts of a daemon. A mount of an unknown daemon counts as this one's. sockets: see
    `daemon_sockets`.

    A dead mount has no process. Where no process of any mount is seen, as in a container, all mounts count.
    """
    here = os.path.realpath(socket)
    if not any(point.path in sockets for point in points):
        return list(points)
    return [point for point in points if os.path.realpath(sockets.get(point.path, os.devnull) or here) == here]


def _printable(name: object) -> str:
    """Return a name on one line, with other characters than printable ones replaced."""
    return "".join(one if one.isprintable() else "?" for one in str(name))


def _print_mounts(changed: Mapping[str, str], command: Sequence[str]) -> None:
    """Print the first lines. Asks no process, so that there is nothing to wait for."""
    with contextlib.suppress(Exception):  # the command must run without a line, too; no code of the job runs yet
        socket = socket_path(changed.get(SOCKET_VARIABLE))
        points = sort_named_first(mount_points(), command)
        sockets = daemon_sockets() if points else {}
        ours = mounts_of_daemon(points, sockets, socket)
        write_line(f"cachefs: {mounts_line(ours, socket, refusal_reason(socket), len(points) - len(ours))}")
        override = find_python_path_override(command)
        if override:
            write_line(
                f"cachefs: {_printable(override)} replaces PYTHONPATH, so the Python processes started there are "
                "not watched: write PYTHONPATH=DIRECTORY:$PYTHONPATH"
            )


def find_python_path_override(command: Sequence[str]) -> str:
    """Return the word of the command, or the script that it names, that sets PYTHONPATH and drops its value; "" where
    none does, judging by the texts."""
    for word in command:
        if word.startswith("PYTHONPATH=") and str(STARTUP_DIRECTORY) not in word:
            return word
    word = _first_script(command)
    return word if word and _PYTHONPATH_OVERRIDE.search(_read_script(word) or "") else ""


def _first_script(command: Sequence[str]) -> str:
    """Return the first word that names a script; "" where there is none, or it should not be read.

    The words after a script are its arguments, and those after a program may be: none of them is opened, as opening a
    FIFO or a tape changes it, and reading a file of a mount may never end.
    """
    for word in command:
        with contextlib.suppress(OSError, ValueError):
            found = os.stat(resolve_locally(word), follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                continue
            is_text = _read_script(word) is not None
            if is_text or not found.st_mode & stat.S_IXUSR:
                return word if is_text and not word.endswith(".py") else ""
    return ""


def _read_script(path: str) -> str | None:
    """Return the first part of a regular file; None where it is no text. Raises OSError."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
    with os.fdopen(os.open(resolve_locally(path), flags), "rb") as file:
        text = file.read(_MAX_SCRIPT_BYTES)
    return None if b"\0" in text else text.decode(errors="replace")


def run_command(command: Sequence[str], job: str | None, socket: str | None, *, quiet: bool = False) -> int:
    """Become *command*, so that signals, terminal and exit status are its own. quiet: print only problems.

    Returns only where the command cannot be run, with the exit status.
    """
    if socket and not _may_exist(socket):
        print(
            f"cachefs: there is no socket {_printable(socket)}; give --socket the socket of a running cachefsd",
            file=sys.stderr,
        )
        return USAGE_EXIT_STATUS
    changed = command_environment(os.environ, command, job, socket)
    spoken = summary_variables(os.environ, quiet=quiet) if _is_program(command[0]) else {}
    if RUN_VARIABLE in spoken:
        changed.pop(TOP_VARIABLE, None)
        _print_mounts(changed, command)
    changed |= spoken
    try:
        if not command[0]:
            raise FileNotFoundError
        with _inherited_signals():
            os.execvpe(command[0], list(command), changed)
    except FileNotFoundError:
        if command[0].startswith("-"):
            print(f"cachefs: no such option: {_printable(command[0])}; see `cachefs run --help`", file=sys.stderr)
            return USAGE_EXIT_STATUS
        print(f"cachefs: {_printable(command[0]) or 'an empty name'}: no such command", file=sys.stderr)
        return NOT_FOUND_EXIT_STATUS
    except OSError as error:
        print(f"cachefs: {_printable(command[0])} cannot be run: {error.strerror}", file=sys.stderr)
        return NOT_RUN_EXIT_STATUS


@contextlib.contextmanager
def _inherited_signals() -> Iterator[None]:
    """Restore the signals that Python ignores, SIGPIPE and SIGXFSZ, for the command that this process becomes.

    With both ignored, `yes | head` in a shell would not end. Their actions before Python started are those of the
    parent. Where the command cannot be run, this process ignores both signals again.
    """
    inherited = _ignored_signals_of(os.getppid())
    restored = [number for number in (signal.SIGPIPE, signal.SIGXFSZ) if not inherited >> (number - 1) & 1]
    before = {number: signal.signal(number, signal.SIG_DFL) for number in restored}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def _ignored_signals_of(process: int) -> int:
    """Return the signals, as bits, that children of a process inherit as ignored; Python restores its own."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{process}/exe").readlink().name.startswith("python"):
            return 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/status").read_text().partition("SigIgn:")[2].split()[0], 16)
    return 0


def _may_exist(path: str) -> bool:
    """Return whether the path exists, or may exist where this user may not look."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True
