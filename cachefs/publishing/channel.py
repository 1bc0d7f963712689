"""The training process's line to its helper. The process never waits for the helper, and survives its end.

A message is one packet of JSON on a socket. What is large (an order, a list of paths) goes into an anonymous file whose
descriptor travels with the packet, so that sending a million samples takes as long as copying them. The position of
each consumer is on a page of memory that both processes map, so that setting it is one store. What the helper has to
say comes back on that page, and the training process prints it: the helper has nothing of the job's open.
"""

import array
import atexit
import contextlib
import fcntl
import hashlib
import heapq
import json
import os
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from cachefs.publishing import stderr
from cachefs.publishing.descriptors import OwnDescriptor
from cachefs.publishing.foreign import is_foreign, mode_of, suppress_own
from cachefs.publishing.page import PAGE_NAME as PAGE_NAME
from cachefs.publishing.page import SLOTS
from cachefs.publishing.page import Need as Need
from cachefs.publishing.page import Page as Page
from cachefs.socket_path import SOCKET_VARIABLE, absolute

PYTHON_VARIABLE: Final = "CACHEFS_PYTHON"
JOB_VARIABLE: Final = "CACHEFS_JOB"
SOCKET_NAME: Final = "s"
MAX_PACKET: Final = 60_000
# Bytes that travel with a packet at most. The paths of ten million samples have fewer.
MAX_BULK: Final = 2 << 30
# A send waits so long at most. Only a helper that is stuck lets its socket fill up.
SEND_SECONDS: Final = 2.0
# A Python that needs longer to start counts as one that does not start. It usually takes 20 ms.
START_SECONDS: Final = 10.0
# The inode number of the pid namespace in which a machine starts (PROC_PID_INIT_INO of Linux).
_FIRST_NAMESPACE: Final = 0xEFFFFFFC
# A job may have restored the default action of SIGPIPE, which would end it.
_AT_ONCE: Final = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
# Different lines that a process says of its loaders.
MOST_LINES: Final = 32
# With this begin the names of claims.
_CLAIM: Final = "rank-"
# Attempts to lock the claims of a job, with so many seconds in between. A holder needs some microseconds.
_LOCK_ATTEMPTS: Final = 100
_LOCK_PAUSE: Final = 0.01
# Attempts to make a directory, where another process removes its parent meanwhile, and to remove one.
_ATTEMPTS: Final = 3
# Steps of Slurm from this number on are no trainings: the batch script, and what Slurm itself runs.
_SPECIAL_STEPS: Final = 0xFFFF_FFF0
_LAUNCH: Final = Path(__file__).with_name("launch.py")


class Op(StrEnum):
    """What a message says; the value of its field "op"."""

    # A consumer begins, with the fields of Opening.
    OPEN = "open"
    # The order of an epoch.
    ORDER = "order"
    # The spec from which all epochs follow.
    SPEC = "spec"
    # What a dataset lists.
    COLUMNS = "columns"
    # The paths that were opened for some samples.
    OPENED = "opened"
    # Batches that a process has begun to load.
    BATCHES = "batches"
    # What is not understood of a consumer (cachefs.publishing.notes).
    NOTE = "note"
    # The files of some samples, as another helper has learned them.
    LEARNED = "learned"
    # A consumer ends.
    CLOSE = "close"
    # The training process is about to end.
    FINISH = "finish"


class Unheard(Exception):
    """The helper is gone, or does not receive."""


class Line:
    """A connection to the helper that has this directory. Any process of the job may have one of its own.

    Where the job has closed the connection's descriptor, the next message makes another connection.
    """

    def __init__(self, directory: Path) -> None:
        """Raises OSError."""
        self._directory = directory
        self._descriptor = _connected(directory)

    def send(self, message: dict[str, Any], bulk: Any = None, *, wait: bool = True) -> None:
        """bulk: an object with a buffer (array, bytes). Raises Unheard; without *wait*, also where the helper is so far
        behind that its socket is full.
        """
        fds: list[int] = []
        try:
            if bulk is not None:
                fds.append(_anonymous_file(bulk))
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            self._send(json.dumps(message).encode(), ancillary, SEND_SECONDS if wait else 0.0)
        except OSError as error:
            if is_foreign(error):
                raise
            raise Unheard(str(error)) from None
        finally:
            for fd in fds:
                os.close(fd)

    def _send(self, packet: bytes, ancillary: list[Any], seconds: float) -> None:
        """Raises OSError. What it waits for is that the helper receives."""
        number = self._descriptor.number
        if number is None:
            self._descriptor = _connected(self._directory)
            number = self._descriptor.number
        if number is None:
            raise OSError("another thread has closed the connection")
        with _borrowed(number) as line:
            try:
                line.sendmsg([packet], ancillary, _AT_ONCE)
            except BlockingIOError:
                if not seconds or not _is_ready(number, select.POLLOUT, seconds):
                    raise
                line.sendmsg([packet], ancillary, _AT_ONCE)

    @property
    def was_hung_up(self) -> bool:
        """Returns whether the helper has closed the connection. It sends nothing that could be received instead."""
        number = self._descriptor.number
        if number is None:
            return False
        with _borrowed(number) as line:
            try:
                return not line.recv(1, _AT_ONCE)
            except BlockingIOError:
                return False
            except OSError as error:
                if is_foreign(error):
                    raise
                return True

    def close(self) -> None:
        self._descriptor.close()


class Channel:
    """The helper of this process, the line to it, and the slots for consumers."""

    def __init__(self, job: str) -> None:
        """Start the helper. Raises OSError where it cannot be started."""
        self.job = job
        self.directory = _helper_directory(job)
        self._owner = os.getpid()
        self._lock = threading.RLock()  # a signal handler of the job may come in between
        self._free = list(range(SLOTS))  # slots, the smallest first
        self._released: deque[int] = deque()  # slots that are free too
        self._heard = 0  # bytes that the helper has said and that were printed
        self.is_closed = False
        try:
            self.page = self._start()
            self.line = Line(self.directory)
        except BaseException:
            remove(self.directory)
            raise
        atexit.register(self.close)

    @property
    def is_ours(self) -> bool:
        """False in a forked child, which needs a channel of its own where it publishes."""
        return os.getpid() == self._owner

    def claims(self, rank: int) -> bool:
        """Returns whether this process is the one of its job on this node that has *rank*. Others may say so too: its
        children, and trainings that a shell starts side by side under one job number."""
        claim = self.directory.parent / f"{_CLAIM}{rank}"
        with suppress_own(OSError), _locked(claim.parent):
            if stat.S_ISLNK(mode_of(claim, follow=False)):
                holder = claim.readlink()
                if str(holder) == _holder(self.directory):
                    return True
                if _is_in_use(claim.with_name(holder.name)):
                    return False
                claim.unlink()
            claim.symlink_to(_holder(self.directory))
            return True
        return False

    def slot(self) -> int:
        """Takes the smallest free slot. Raises IndexError where all are taken."""
        with self._lock:
            while self._released:
                heapq.heappush(self._free, self._released.popleft())
            return heapq.heappop(self._free)

    def release(self, slot: int) -> None:
        """Gives a slot back. Takes no lock, since Python may be collecting garbage in the middle of `slot`."""
        self._released.append(slot)

    def hear(self) -> None:
        """Print what the helper has said since the last call; it says each thing once."""
        said = self.page.said
        if said == self._heard or not self._lock.acquire(blocking=False):
            return
        try:
            text, self._heard = self.page.text(self._heard, said), said
        finally:
            self._lock.release()
        for line in text.splitlines():
            say(line)

    def close(self) -> None:
        """The process ends, and with it the helper."""
        if self.is_ours and not self.is_closed:
            try:
                self.line.send({"op": Op.FINISH}, wait=False)
            except Unheard:
                if self.line.was_hung_up:  # it was killed
                    remove(self.directory)
            self.hear()
            self.is_closed = True
            self.line.close()

    def _start(self) -> Page:
        """Start the helper, and return the page that is shared with it. Raises OSError."""
        with contextlib.ExitStack() as closing, _packet_socket() as listener:
            listener.bind(str(self.directory / SOCKET_NAME))
            # From here on messages wait until the helper has come up.
            listener.listen(1024)
            alive = _above_stderr(os.pidfd_open(self._owner))
            closing.callback(os.close, alive)
            page = _above_stderr(Page.create())
            closing.callback(os.close, page)
            fds = (alive, listener.fileno(), page)
            started_with = ",".join(map(str, stderr.started_with or ()))
            _launch(self.directory, [*map(str, (self.directory, self._owner, *fds)), self.job, started_with], fds)
            return Page(page)


_channel: Channel | None = None
# By process, as a child may be forked while another thread of its parent holds the lock: threads that make the channel.
_making: dict[int, threading.RLock] = {}
# The process that makes its channel now.
_maker = 0


def has_published() -> bool:
    """Has this process itself a channel?"""
    return _channel is not None and _channel.is_ours


# Processes, by number, in which a DataLoader was iterated, and those of which one has read from a mount, or that have
# asked for a channel. A forked child has its parent's numbers here, and not its own.
iterated_loaders: Final[set[int]] = set()
mount_readers: Final[set[int]] = set()


def read_no_mount() -> bool:
    """Returns whether this process has iterated DataLoaders, none of which has read from a mount."""
    return os.getpid() in iterated_loaders - mount_readers


def hear_last() -> None:
    """Print what the helper of this process has said since its channel was closed."""
    if _channel is not None and _channel.is_ours:
        _channel.hear()


def channel() -> Channel:
    """The channel of this process, which is made at the first call.

    Raises OSError, also where this thread is making it, and a signal handler of the job that has interrupted that asks
    for it: waiting would never end.
    """
    global _channel, _maker
    if _channel is not None and _channel.is_ours:
        return _channel
    mount_readers.add(os.getpid())
    making = _making.setdefault(os.getpid(), threading.RLock())
    if not making.acquire(timeout=2 * START_SECONDS):
        raise OSError("another thread has been starting the helper for too long")
    if _maker == os.getpid():
        making.release()
        raise OSError("a signal handler has interrupted the start of the helper")
    try:
        _maker = os.getpid()
        if _channel is not None and not _channel.is_ours:
            _channel.line.close()  # the copy that this process was forked with
            _channel = None
        if _channel is None:
            _channel = Channel(job_name())
        return _channel
    finally:
        _maker = 0
        making.release()


def job_name(command: Sequence[str] | None = None) -> str:
    """The name of this job: as `cachefs run --job` or the environment says; else made of the number that the cluster's
    scheduler has given it; else of the script and the process number. command: None for that of this process."""
    command = getattr(sys, "argv", []) if command is None else command
    named = os.environ.get(JOB_VARIABLE)
    for variable in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        if not named and os.environ.get(variable):
            named = f"{variable.partition('_')[0].lower()}-{os.environ[variable]}{slurm_step()}"
    scripts = [Path(word).stem for word in command if word.endswith(".py")]
    name = named or f"{next(iter(scripts), None) or Path(next(iter(command), 'python')).stem}-{process_name()}"
    return re.sub(r"[^A-Za-z0-9._:@+-]", "_", name).lstrip(".:@+-")[:128] or f"job-{process_name()}"


def slurm_step() -> str:
    """The step of Slurm that this process belongs to, which all ranks of one `srun` share; empty outside of steps."""
    step = os.environ.get("SLURM_STEP_ID", "")
    return f".{step}" if step.isdecimal() and int(step) < _SPECIAL_STEPS else ""


def process_name() -> str:
    """A name of this process that no other one of the node has: its number, and in a container also the inode number of
    the pid namespace, as the first process of each container has number 1."""
    namespace = _FIRST_NAMESPACE
    with suppress_own(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return str(os.getpid()) if namespace == _FIRST_NAMESPACE else f"{os.getpid()}@{namespace}"


_warned = False
_said: set[str] = set()


def warn(problem: str) -> None:
    """Print *problem* on stderr, unless this process has printed one already: publishing only makes a job faster, which
    is not worth more than one line."""
    global _warned
    if not _warned:
        _warned = True
        say(f"{problem}; the job goes on without publishing that")


def say_once(line: str) -> None:
    """Print this line, unless this process has printed it already. There are MOST_LINES at most."""
    if line not in _said and len(_said) < MOST_LINES:
        _said.add(line)
        say(line)


def say(line: str) -> None:
    """Print a line that is about no problem."""
    stderr.write_line(f"cachefs: {line}")


def _connected(directory: Path) -> OwnDescriptor:
    """A connection to the helper. Fails at once, and does not wait, where too many connections wait to be accepted.
    Raises OSError."""
    made = _packet_socket()
    try:
        made.setblocking(False)
        made.connect(str(directory / SOCKET_NAME))
        return OwnDescriptor(made.detach())
    finally:
        made.close()


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """A socket of Python with this descriptor, which stays open."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, number)
    try:
        line.setblocking(False)  # whatever the job's default timeout is
        yield line
    finally:
        line.detach()


def _is_ready(number: int, event: int, seconds: float) -> bool:
    """Waits until the descriptor is ready for *event*, or its other side is gone."""
    poll = select.poll()
    poll.register(number, event)
    return bool(poll.poll(round(1000 * seconds)))


def _packet_socket() -> socket.socket:
    """Raises OSError."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return made if made.fileno() > 2 else socket.socket(fileno=_above_stderr(made.detach()))


def _above_stderr(fd: int) -> int:
    """The descriptor, moved where it would be one of the first three, which a job may have closed: neither it nor the
    helper may take ours for its stdout. Raises OSError."""
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def _anonymous_file(bulk: Any) -> int:
    """A descriptor of a new file with these bytes. Raises OSError."""
    view = memoryview(bulk).cast("B")
    if len(view) > MAX_BULK:
        raise OSError(f"{len(view) >> 20} MiB at once; the limit is {MAX_BULK >> 20} MiB")
    fd = os.memfd_create("cachefs")
    try:
        while view:
            view = view[os.write(fd, view) :]
        return fd
    except BaseException:
        os.close(fd)
        raise


def _helper_directory(job: str) -> Path:
    """A new directory for the helper, beside those of the job's other processes on this node that use the same daemon.
    It is private to the user. Raises OSError.
    """
    daemon = os.environ.get(SOCKET_VARIABLE) or ""
    of_job = hashlib.blake2b(f"{job}\0{daemon and absolute(daemon)}".encode(), digest_size=8).hexdigest()
    try:
        return _new_directory(Path("/dev/shm", f"cachefs-{os.geteuid()}", of_job))
    except OSError as error:  # there is none, or it is full
        if is_foreign(error):
            raise
        return _new_directory(Path(tempfile.gettempdir(), f"cachefs-{os.geteuid()}", of_job))


def _new_directory(of_job: Path) -> Path:
    """A new directory in one that is private to the user, and whose parent is. Raises OSError."""
    attempts = _ATTEMPTS
    while True:
        try:
            _make_private(of_job.parent)
            _make_private(of_job)
            return Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=of_job))
        except FileNotFoundError as error:
            # A helper that was the job's last has removed the directory of the job at the same moment.
            if is_foreign(error):
                raise
            attempts -= 1
            if not attempts:
                raise


def remove(directory: Path) -> None:
    """Remove the directory of a helper, and those of the job and of the user if it was the last one in them."""
    for _ in range(_ATTEMPTS):  # another process may be removing the same files
        with suppress_own(OSError):
            shutil.rmtree(directory)
            break
    with suppress_own(OSError), _locked(directory.parent):
        for name in os.listdir(directory.parent):
            claim = directory.with_name(name)
            if name.startswith(_CLAIM) and os.readlink(claim) == _holder(directory):
                claim.unlink()
    with suppress_own(OSError):
        directory.parent.rmdir()
        directory.parent.parent.rmdir()


@contextlib.contextmanager
def _locked(of_job: Path) -> Iterator[None]:
    """Keeps the job's other processes from changing its claims. Raises OSError where one of them has stopped at it."""
    fd = os.open(of_job, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for attempt in range(_LOCK_ATTEMPTS):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == _LOCK_ATTEMPTS - 1:
                    raise
                select.select((), (), (), _LOCK_PAUSE)
        yield
        fcntl.flock(fd, fcntl.LOCK_UN)  # a process that was just forked may have it open too
    finally:
        os.close(fd)


def _holder(directory: Path) -> str:
    """What a claim says of its holder: a path that leads nowhere, as the claim is no directory of a helper."""
    return f"holder/{directory.name}"


def _is_in_use(directory: Path) -> bool:
    """Returns whether the helper's directory belongs to another process that runs."""
    owner = directory.name.partition("-")[0]
    return bool(mode_of(directory) and owner != str(os.getpid()) and mode_of(f"/proc/{owner}"))


def _make_private(directory: Path) -> None:
    """Raises OSError."""
    with suppress_own(FileExistsError):
        directory.mkdir(0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory} is not a private directory of this user; remove it")


def _launch(directory: Path, arguments: Sequence[str], fds: tuple[int, int, int]) -> None:
    """Run launch.py, which becomes the helper, or leaves it behind. It gets a session of its own, since it must outlive
    a Ctrl-C: it ends with its owner. Raises OSError.
    """
    environment = dict(os.environ)
    if environment.get(SOCKET_VARIABLE):
        environment[SOCKET_VARIABLE] = absolute(environment[SOCKET_VARIABLE])
    command = command_of("helper", *arguments)
    try:
        said = run_unseen(command, environment, fds, START_SECONDS)
    except (ImportError, OSError) as error:  # a filter of system calls may refuse what that needs
        if is_foreign(error):
            raise
        _launch_child([*command, "child"], fds, environment)
        return
    if said is None:
        raise OSError(f"{command[0]} does not start within {START_SECONDS:.0f} s")
    if not mode_of(directory / PAGE_NAME, follow=False):
        raise OSError(f"{command[0]} cannot run {_LAUNCH}")


def command_of(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module of cachefs.publishing in a process beside this one (see launch.py)."""
    return [os.environ.get(PYTHON_VARIABLE) or sys.executable, "-I", "-S", str(_LAUNCH), module, *arguments]


def run_unseen(
    command: Sequence[str], environment: Mapping[str, str], fds: Sequence[int], seconds: float
) -> bytes | None:
    """Runs a program that is no child of this process, and waits for what it says first.

    It gets *fds*, three at most, and the descriptor of a pipe whose number follows its arguments. Returns its first
    words there, empty where it has ended without any; None where it was killed, since it had said nothing for
    *seconds*. Raises OSError where it cannot be run, and ImportError where there was no compiler when cachefs was
    installed.
    """
    from cachefs import _process

    pairs = tuple(os.fsencode(f"{name}={value}") for name, value in environment.items())
    reader, writer = map(_above_stderr, os.pipe())
    try:
        try:
            program = os.fsencode(command[0] if "/" in command[0] else shutil.which(command[0]) or command[0])
            arguments = tuple(map(os.fsencode, [*command, str(writer)]))
            first, second, third = (*fds, writer, writer, writer)[:3]
            number = _process.start(program, arguments, pairs, (first, second, third, writer))
        except OSError as error:
            if is_foreign(error):
                raise
            raise OSError(error.errno, os.strerror(error.errno or 0), command[0]) from None
        finally:
            os.close(writer)
        if _is_ready(reader, select.POLLIN, seconds):
            return os.read(reader, select.PIPE_BUF)
        with suppress_own(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
        return None
    finally:
        os.close(reader)


def _launch_child(command: Sequence[str], fds: Sequence[int], environment: dict[str, str]) -> None:
    """The same where nothing was compiled, or that is refused: as a child, for a moment. Raises OSError."""
    started = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=fds,
        start_new_session=True,
        env=environment,
    )
    # `Popen.wait` would measure its timeout by a clock that the job may have replaced.
    ended = os.pidfd_open(started.pid)
    try:
        is_started = _is_ready(ended, select.POLLIN, START_SECONDS)
    finally:
        os.close(ended)
    if not is_started:
        started.kill()
    status = started.wait()
    if not is_started:
        raise OSError(f"{command[0]} does not start within {START_SECONDS:.0f} s")
    if status:
        raise OSError(f"{command[0]} cannot run {_LAUNCH} (exit status {status})")
