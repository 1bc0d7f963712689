"""The training process's line to its helper. The process never waits for the helper, and survives its end.

A message is one packet of JSON on a socket. What is large (an order, a list of paths) goes into an anonymous file whose
descriptor travels with the packet, so that sending a million samples takes as long as copying them. The position of
each consumer is on a page of memory that both processes map, so that setting it is one store.
"""

import array
import contextlib
import hashlib
import json
import mmap
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import cachefs

# Names the helper's directory to worker processes, in whatever way they are started.
DIRECTORY_VARIABLE: Final = "CACHEFS_PUBLISHER"
PYTHON_VARIABLE: Final = "CACHEFS_PYTHON"
JOB_VARIABLE: Final = "CACHEFS_JOB"
SOCKET_NAME: Final = "s"
PAGE_NAME: Final = "page"
# Consumers of one training process at most.
SLOTS: Final = 256
PAGE_SIZE: Final = 8 * 2 * SLOTS
MAX_PACKET: Final = 60_000
# A send waits so long at most. Only a helper that is stuck lets its socket fill up.
SEND_SECONDS: Final = 2.0
_POSITION_BITS: Final = 40


class Op(StrEnum):
    """What a message says; the value of its field "op"."""

    # A consumer begins, with the fields of Opening.
    OPEN = "open"
    # The order of an epoch.
    ORDER = "order"
    # The spec from which all epochs follow.
    SPEC = "spec"
    # The paths that were opened for some samples.
    OPENED = "opened"
    # A consumer ends.
    CLOSE = "close"


class Unheard(Exception):
    """The helper is gone, or does not receive."""


class Page:
    """What changes with every batch, in one slot per consumer.

    A slot is two 64-bit words, each of which is written in one store. The first word is the epoch and the position in
    it. The second word says whether the files of all the consumer's samples are known.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Raises OSError."""
        fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0) | os.O_CLOEXEC, 0o600)
        try:
            if create:
                os.ftruncate(fd, PAGE_SIZE)
            self._words = memoryview(mmap.mmap(fd, PAGE_SIZE)).cast("Q")
        finally:
            os.close(fd)

    def set_position(self, slot: int, epoch: int, position: int) -> None:
        self._words[2 * slot] = (epoch + 1) << _POSITION_BITS | position

    def position(self, slot: int) -> tuple[int, int] | None:
        """(epoch, position); None where none was set yet."""
        word = self._words[2 * slot]
        return ((word >> _POSITION_BITS) - 1, word & ((1 << _POSITION_BITS) - 1)) if word else None

    def set_learned(self, slot: int, learned: bool) -> None:
        self._words[2 * slot + 1] = learned

    def learned(self, slot: int) -> bool:
        return bool(self._words[2 * slot + 1])


class Line:
    """A connection to the helper that has this directory. Any process of the job may have one of its own."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # This fails at once, and does not wait, where too many connections wait to be accepted.
            self._socket.settimeout(SEND_SECONDS)
            self._socket.connect(str(directory / SOCKET_NAME))
        except OSError:
            self._socket.close()
            raise

    def send(self, message: dict[str, Any], bulk: Any = None, *, wait: bool = True) -> None:
        """bulk: an object with a buffer (array, bytes). Raises Unheard; without *wait*, also where the helper is so far
        behind that its socket is full.
        """
        fds = [] if bulk is None else [_anonymous_file(bulk)]
        try:
            self._socket.settimeout(SEND_SECONDS if wait else 0)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            # A job may have restored the default action of SIGPIPE, which would end it.
            self._socket.sendmsg([json.dumps(message).encode()], ancillary, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise Unheard(str(error)) from None
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        self._socket.close()


class Channel:
    """The helper of this process, the line to it, and the slots for consumers."""

    def __init__(self, job: str) -> None:
        """Start the helper. Raises OSError where it cannot be started."""
        self.job = job
        self._owner = os.getpid()
        self._free = list(range(SLOTS - 1, -1, -1))  # slots, the smallest last
        self.directory = _helper_directory(job)
        self.page = Page(self.directory / PAGE_NAME, create=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self.directory / SOCKET_NAME))
            # From here on messages wait until the helper has come up.
            listener.listen(1024)
            self._process = _start(listener.fileno(), self._owner, self.directory)
        self.line = Line(self.directory)
        os.environ[DIRECTORY_VARIABLE] = str(self.directory)

    @property
    def is_ours(self) -> bool:
        """False in a forked child, which needs a channel of its own where it publishes."""
        return os.getpid() == self._owner

    def slot(self) -> int:
        """Take the smallest free slot. Raises IndexError where all are taken."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        self._free.append(slot)
        self._free.sort(reverse=True)


_channel: Channel | None = None


def channel() -> Channel:
    """The channel of this process, which is made at the first call. Raises OSError."""
    global _channel
    if _channel is None or not _channel.is_ours:
        _channel = Channel(job_name())
    return _channel


def job_name(command: Sequence[str] = sys.argv) -> str:
    """The name of this job: as `cachefs run --job` or the environment says; else made of the number that the cluster's
    scheduler has given it; else of the script and the process number."""
    named = os.environ.get(JOB_VARIABLE)
    for variable in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        if not named and os.environ.get(variable):
            named = f"{variable.partition('_')[0].lower()}-{os.environ[variable]}"
    scripts = [Path(word).stem for word in command if word.endswith(".py")]
    name = named or f"{next(iter(scripts), None) or Path(next(iter(command), 'python')).stem}-{os.getpid()}"
    return re.sub(r"[^A-Za-z0-9._:@+-]", "_", name).lstrip(".:@+-")[:128] or f"job-{os.getpid()}"


_warned = False


def warn(problem: str) -> None:
    """Print *problem* on stderr, unless this process has printed one already: publishing only makes a job faster, which
    is not worth more than one line."""
    global _warned
    if not _warned:
        _warned = True
        with contextlib.suppress(Exception):
            print(f"cachefs: {problem}; the job goes on without publishing that", file=sys.stderr, flush=True)


def _anonymous_file(bulk: Any) -> int:
    fd = os.memfd_create("cachefs")
    try:
        view = memoryview(bulk).cast("B")
        while view:
            view = view[os.write(fd, view) :]
        return fd
    except BaseException:
        os.close(fd)
        raise


def _helper_directory(job: str) -> Path:
    """A new directory for the helper, beside those of the job's other processes on this node. It is private to the
    user. Raises OSError.
    """
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else tempfile.gettempdir()
    top = Path(shared, f"cachefs-{os.geteuid()}")
    of_job = top / hashlib.blake2b(job.encode(), digest_size=8).hexdigest()
    attempts = 3
    while True:
        try:
            _make_private(top)
            _make_private(of_job)
            return Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=of_job))
        except FileNotFoundError:
            # A helper that was the job's last has removed the directory of the job at the same moment.
            attempts -= 1
            if not attempts:
                raise


def _make_private(directory: Path) -> None:
    """Raises OSError."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory} is not a private directory of this user; remove it")


def _start(listener: int, owner: int, directory: Path) -> subprocess.Popen[bytes]:
    """Start the helper. It gets a session of its own, since it must outlive a Ctrl-C: it ends with its owner."""
    package = str(Path(cachefs.__file__).parents[1])
    code = "import sys; sys.path.append(sys.argv[1]); from cachefs.publishing.helper import main; main(*sys.argv[2:])"
    python = os.environ.get(PYTHON_VARIABLE) or sys.executable
    return subprocess.Popen(
        [python, "-P", "-c", code, package, str(listener), str(owner), str(directory)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[listener],
        start_new_session=True,
        env=_without_hooks(os.environ),
    )


def _without_hooks(environment: "os._Environ[str]") -> dict[str, str]:
    """The environment without what `cachefs run` puts into it: the helper is no training process."""
    hooks = str(Path(cachefs.__file__).parent / "hooks")
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    kept = os.pathsep.join(path for path in paths if not path.startswith(hooks))
    without = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    return {**without, "PYTHONPATH": kept} if kept else without
