"""The training process's connection to its helper. The process never waits for the helper, and survives its end.

A message is one packet of JSON on a socket. Large data (an order, a list of paths) goes into an anonymous file whose
descriptor travels with the packet, so that sending a million samples takes as long as copying them. The position of
each consumer is on a page of memory that both processes map, so that setting it is one store. The helper has none of
the job's files open: it writes its log lines to that page, and the training process prints them.
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
from cachefs.publishing.job_exceptions import is_from_job, mode_of, suppress_own
from cachefs.publishing.page import PAGE_NAME as PAGE_NAME
from cachefs.publishing.page import SLOTS
from cachefs.publishing.page import SharedPage as SharedPage
from cachefs.publishing.page import WantedSamples as WantedSamples
from cachefs.publishing.stderr import OwnDescriptor
from cachefs.socket_path import SOCKET_VARIABLE, absolute_path

PYTHON_VARIABLE: Final = "CACHEFS_PYTHON"
JOB_VARIABLE: Final = "CACHEFS_JOB"
SOCKET_NAME: Final = "s"
MAX_PACKET: Final = 60_000
# Maximum size in bytes of the data sent with a packet. The paths of ten million samples fit.
MAX_BULK: Final = 2 << 30
# Maximum duration of a send. Only a helper that is stuck lets its socket fill up.
SEND_SECONDS: Final = 2.0
# Timeout for starting Python, which usually takes 20 ms.
START_SECONDS: Final = 10.0
# Inode number of the pid namespace of a machine's first process (PROC_PID_INIT_INO of Linux).
_FIRST_NAMESPACE: Final = 0xEFFFFFFC
# MSG_NOSIGNAL: a job may have restored the default action of SIGPIPE, which would end it.
_NO_WAIT: Final = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
# Maximum number of different lines that a process prints about its loaders.
MAX_LINES: Final = 32
# Prefix of the names of claims.
_CLAIM_PREFIX: Final = "rank-"
# Attempts to lock the claims of a job, and the pause between them in seconds. A holder needs some microseconds.
_LOCK_ATTEMPTS: Final = 100
_LOCK_PAUSE: Final = 0.01
# Attempts to make a directory whose parent another process may remove meanwhile, and to remove a directory.
_ATTEMPTS: Final = 3
# Slurm steps from this number on are no trainings but the batch script, and processes of Slurm itself.
_SPECIAL_STEPS: Final = 0xFFFF_FFF0
_LAUNCH: Final = Path(__file__).with_name("launch.py")


class MessageKind(StrEnum):
    """The kind of a message: the value of its field "op"."""

    # A consumer begins, with the fields of Opening.
    OPEN = "open"
    # The order of an epoch.
    ORDER = "order"
    # The spec from which all epochs follow.
    SPEC = "spec"
    # The columns of a dataset.
    COLUMNS = "columns"
    # The paths that were opened for some samples.
    OPENED = "opened"
    # Batches that a process has begun to load.
    BATCHES = "batches"
    # The reason why a consumer is not understood (cachefs.publishing.diagnostics).
    NOTE = "note"
    # The files of some samples, as learned by another helper.
    LEARNED = "learned"
    # A consumer ends.
    CLOSE = "close"
    # The training process is about to end.
    FINISH = "finish"


class HelperUnreachable(Exception):
    """Raised where the helper has ended, or does not receive."""


class HelperConnection:
    """A connection to the helper in one directory. Each process of the job may have its own connection.

    Where the job has closed the connection's descriptor, the next message makes another connection.
    """

    def __init__(self, directory: Path) -> None:
        """Raises OSError."""
        self._directory = directory
        self._descriptor = _connect(directory)

    def send(self, message: dict[str, Any], bulk: Any = None, *, wait: bool = True) -> None:
        """Send a message. Raises HelperUnreachable; without *wait*, also where the helper is so far behind that its
        socket is full.

        bulk: an object with a buffer (array, bytes).
        """
        fds: list[int] = []
        try:
            if bulk is not None:
                fds.append(_anonymous_file(bulk))
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            self._send_packet(json.dumps(message).encode(), ancillary, SEND_SECONDS if wait else 0.0)
        except OSError as error:
            if is_from_job(error):
                raise
            raise HelperUnreachable(str(error)) from None
        finally:
            for fd in fds:
                os.close(fd)

    def _send_packet(self, packet: bytes, ancillary: list[Any], seconds: float) -> None:
        """Send a packet; wait up to *seconds* for the helper to receive. Raises OSError."""
        number = self._descriptor.number
        if number is None:
            self._descriptor = _connect(self._directory)
            number = self._descriptor.number
        if number is None:
            raise OSError("another thread has closed the connection")
        with _borrow_socket(number) as line:
            try:
                line.sendmsg([packet], ancillary, _NO_WAIT)
            except BlockingIOError:
                if not seconds or not _wait_until_ready(number, select.POLLOUT, seconds):
                    raise
                line.sendmsg([packet], ancillary, _NO_WAIT)

    @property
    def is_disconnected(self) -> bool:
        """Return whether the helper has closed the connection. There is nothing else to receive from the helper."""
        number = self._descriptor.number
        if number is None:
            return False
        with _borrow_socket(number) as line:
            try:
                return not line.recv(1, _NO_WAIT)
            except BlockingIOError:
                return False
            except OSError as error:
                if is_from_job(error):
                    raise
                return True

    def close(self) -> None:
        self._descriptor.close()


class HelperChannel:
    """Owns the helper of this process, the connection to it, and the slots for consumers."""

    def __init__(self, job: str) -> None:
        """Start the helper. Raises OSError where it cannot be started."""
        self.job = job
        self.directory = _helper_directory(job)
        self._owner = os.getpid()
        self._lock = threading.RLock()  # a signal handler of the job may come in between
        self._free = list(range(SLOTS))  # slots, the smallest first
        self._released: deque[int] = deque()  # slots released since the last `take_slot`
        self._printed_bytes = 0  # bytes of the helper's log lines that were printed
        self.is_closed = False
        try:
            self.page = self._start_helper()
            self.connection = HelperConnection(self.directory)
        except BaseException:
            remove_helper_directory(self.directory)
            raise
        atexit.register(self.close)

    @property
    def is_ours(self) -> bool:
        """Return whether this process made the channel. A forked child that publishes needs a channel of its own."""
        return os.getpid() == self._owner

    def claim_rank(self, rank: int) -> bool:
        """Claim *rank* of the job on this node, and return whether this process holds the claim. Other processes may
        ask for the same rank: children, and trainings that a shell starts side by side under one job number."""
        claim = self.directory.parent / f"{_CLAIM_PREFIX}{rank}"
        with suppress_own(OSError), _lock_claims(claim.parent):
            if stat.S_ISLNK(mode_of(claim, follow=False)):
                holder = claim.readlink()
                if str(holder) == _claim_target(self.directory):
                    return True
                if _is_in_use(claim.with_name(holder.name)):
                    return False
                claim.unlink()
            claim.symlink_to(_claim_target(self.directory))
            return True
        return False

    def take_slot(self) -> int:
        """Take the smallest free slot. Raises IndexError where all are taken."""
        with self._lock:
            while self._released:
                heapq.heappush(self._free, self._released.popleft())
            return heapq.heappop(self._free)

    def release_slot(self, slot: int) -> None:
        """Give a slot back. Takes no lock, since Python may be collecting garbage in the middle of `take_slot`."""
        self._released.append(slot)

    def print_helper_lines(self) -> None:
        """Print the helper's log lines that were added since the last call."""
        log_length = self.page.log_length
        if log_length == self._printed_bytes or not self._lock.acquire(blocking=False):
            return
        try:
            text, self._printed_bytes = self.page.log_text(self._printed_bytes, log_length), log_length
        finally:
            self._lock.release()
        for line in text.splitlines():
            print_line(line)

    def close(self) -> None:
        """End the helper, as the process ends."""
        if self.is_ours and not self.is_closed:
            try:
                self.connection.send({"op": MessageKind.FINISH}, wait=False)
            except HelperUnreachable:
                if self.connection.is_disconnected:  # it was killed
                    remove_helper_directory(self.directory)
            self.print_helper_lines()
            self.is_closed = True
            self.connection.close()

    def _start_helper(self) -> SharedPage:
        """Start the helper, and return the page shared with it. Raises OSError."""
        with contextlib.ExitStack() as closing, _packet_socket() as listener:
            listener.bind(str(self.directory / SOCKET_NAME))
            # From here on messages wait until the helper has come up.
            listener.listen(1024)
            alive = _above_stderr(os.pidfd_open(self._owner))
            closing.callback(os.close, alive)
            page = _above_stderr(SharedPage.create())
            closing.callback(os.close, page)
            fds = (alive, listener.fileno(), page)
            started_with = ",".join(map(str, stderr.initial_identity or ()))
            _launch_helper(
                self.directory, [*map(str, (self.directory, self._owner, *fds)), self.job, started_with], fds
            )
            return SharedPage(page)


_channel: HelperChannel | None = None
# Locks by process number, for the threads that make the channel. By process, since a child may be forked while another
# thread of its parent holds the lock.
_creation_locks: dict[int, threading.RLock] = {}
# Number of the process that is making its channel; 0 outside of that.
_creating_process = 0


def has_published() -> bool:
    """Return whether this process has a channel of its own."""
    return _channel is not None and _channel.is_ours


# Numbers of processes in which a DataLoader was iterated, and of processes with a DataLoader that has read from a
# mount, or that have asked for a channel. A forked child inherits its parent's numbers, without its own.
iterated_loaders: Final[set[int]] = set()
mount_readers: Final[set[int]] = set()


def has_read_no_mount() -> bool:
    """Return whether this process has iterated DataLoaders, none of which has read from a mount."""
    return os.getpid() in iterated_loaders - mount_readers


def print_last_helper_lines() -> None:
    """Print the helper's log lines that were added after the channel of this process was closed."""
    if _channel is not None and _channel.is_ours:
        _channel.print_helper_lines()


def own_channel() -> HelperChannel:
    """Return the channel of this process. The first call makes the channel.

    Raises OSError, also where a signal handler of the job has interrupted this thread while it was making the channel,
    and calls this function: waiting would never end.
    """
    global _channel, _creating_process
    if _channel is not None and _channel.is_ours:
        return _channel
    mount_readers.add(os.getpid())
    making = _creation_locks.setdefault(os.getpid(), threading.RLock())
    if not making.acquire(timeout=2 * START_SECONDS):
        raise OSError("another thread has been starting the helper for too long")
    if _creating_process == os.getpid():
        making.release()
        raise OSError("a signal handler has interrupted the start of the helper")
    try:
        _creating_process = os.getpid()
        if _channel is not None and not _channel.is_ours:
            _channel.connection.close()  # the copy that this process was forked with
            _channel = None
        if _channel is None:
            _channel = HelperChannel(job_name())
        return _channel
    finally:
        _creating_process = 0
        making.release()


def job_name(command: Sequence[str] | None = None) -> str:
    """Return the name of this job: the one given by `cachefs run --job` or the environment; else made of the job number
    of the cluster's scheduler; else of the script and the process number.

    command: the job's command; None for that of this process.
    """
    command = getattr(sys, "argv", []) if command is None else command
    named = os.environ.get(JOB_VARIABLE)
    for variable in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        if not named and os.environ.get(variable):
            named = f"{variable.partition('_')[0].lower()}-{os.environ[variable]}{slurm_step()}"
    scripts = [Path(word).stem for word in command if word.endswith(".py")]
    name = named or f"{next(iter(scripts), None) or Path(next(iter(command), 'python')).stem}-{process_name()}"
    return re.sub(r"[^A-Za-z0-9._:@+-]", "_", name).lstrip(".:@+-")[:128] or f"job-{process_name()}"


def slurm_step() -> str:
    """Return the Slurm step of this process, which all ranks of one `srun` share; "" outside of steps."""
    step = os.environ.get("SLURM_STEP_ID", "")
    return f".{step}" if step.isdecimal() and int(step) < _SPECIAL_STEPS else ""


def process_name() -> str:
    """Return a name that identifies this process on the node: its number, and in a container also the inode number of
    the pid namespace, as the first process of each container has number 1."""
    namespace = _FIRST_NAMESPACE
    with suppress_own(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return str(os.getpid()) if namespace == _FIRST_NAMESPACE else f"{os.getpid()}@{namespace}"


_has_warned = False
_printed_lines: set[str] = set()


def warn_once(problem: str) -> None:
    """Print *problem* on stderr, unless this process has printed a problem already: publishing only makes a job faster,
    which is not worth more than one line."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        print_line(f"{problem}; the job continues, and this is not published")


def print_once(line: str) -> None:
    """Print a line, unless this process has printed it already, or has printed MAX_LINES different lines."""
    if line not in _printed_lines and len(_printed_lines) < MAX_LINES:
        _printed_lines.add(line)
        print_line(line)


def print_line(line: str) -> None:
    """Print a line on stderr."""
    stderr.write_line(f"cachefs: {line}")


def _connect(directory: Path) -> OwnDescriptor:
    """Return a connection to the helper. Fails at once where too many connections are pending. Raises OSError."""
    made = _packet_socket()
    try:
        made.setblocking(False)
        made.connect(str(directory / SOCKET_NAME))
        return OwnDescriptor(made.detach())
    finally:
        made.close()


@contextlib.contextmanager
def _borrow_socket(number: int) -> Iterator[socket.socket]:
    """Yield a Python socket for this descriptor, which stays open."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, number)
    try:
        line.setblocking(False)  # the job may have set a default timeout
        yield line
    finally:
        line.detach()


def _wait_until_ready(number: int, event: int, seconds: float) -> bool:
    """Wait until the descriptor is ready for *event*, or its other side is gone."""
    poll = select.poll()
    poll.register(number, event)
    return bool(poll.poll(round(1000 * seconds)))


def _packet_socket() -> socket.socket:
    """Raises OSError."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return made if made.fileno() > 2 else socket.socket(fileno=_above_stderr(made.detach()))


def _above_stderr(fd: int) -> int:
    """Return the descriptor, moved to a number above 2. The job may have closed its first three descriptors, and
    neither the job nor the helper may take one of ours for its stdout. Raises OSError."""
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def _anonymous_file(bulk: Any) -> int:
    """Return the descriptor of a new file with these bytes. Raises OSError."""
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
    """Make a directory for the helper, private to the user, beside those of the job's other processes on this node that
    use the same daemon. Raises OSError.
    """
    daemon = os.environ.get(SOCKET_VARIABLE) or ""
    of_job = hashlib.blake2b(f"{job}\0{daemon and absolute_path(daemon)}".encode(), digest_size=8).hexdigest()
    try:
        return _new_directory(Path("/dev/shm", f"cachefs-{os.geteuid()}", of_job))
    except OSError as error:  # /dev/shm is missing or full
        if is_from_job(error):
            raise
        return _new_directory(Path(tempfile.gettempdir(), f"cachefs-{os.geteuid()}", of_job))


def _new_directory(of_job: Path) -> Path:
    """Make a directory in *of_job*, which like its parent is private to the user. Raises OSError."""
    attempts = _ATTEMPTS
    while True:
        try:
            _make_private(of_job.parent)
            _make_private(of_job)
            return Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=of_job))
        except FileNotFoundError as error:
            # The last other helper of the job has removed the directory of the job at the same moment.
            if is_from_job(error):
                raise
            attempts -= 1
            if not attempts:
                raise


def remove_helper_directory(directory: Path) -> None:
    """Remove the directory of a helper, and the directories of the job and of the user where they become empty."""
    for _ in range(_ATTEMPTS):  # another process may be removing the same files
        with suppress_own(OSError):
            shutil.rmtree(directory)
            break
    with suppress_own(OSError), _lock_claims(directory.parent):
        for name in os.listdir(directory.parent):
            claim = directory.with_name(name)
            if name.startswith(_CLAIM_PREFIX) and os.readlink(claim) == _claim_target(directory):
                claim.unlink()
    with suppress_own(OSError):
        directory.parent.rmdir()
        directory.parent.parent.rmdir()


@contextlib.contextmanager
def _lock_claims(of_job: Path) -> Iterator[None]:
    """Lock the job's claims. Raises OSError where another process has stopped with the lock held."""
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
        fcntl.flock(fd, fcntl.LOCK_UN)  # a process that was just forked may have the directory open too
    finally:
        os.close(fd)


def _claim_target(directory: Path) -> str:
    """Return the target of a claim's symbolic link, which leads nowhere, as the claim is no directory of a helper."""
    return f"holder/{directory.name}"


def _is_in_use(directory: Path) -> bool:
    """Return whether the helper's directory belongs to another process that runs."""
    owner = directory.name.partition("-")[0]
    return bool(mode_of(directory) and owner != str(os.getpid()) and mode_of(f"/proc/{owner}"))


def _make_private(directory: Path) -> None:
    with suppress_own(FileExistsError):
        directory.mkdir(0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory} is not a private directory of this user; remove it")


def _launch_helper(directory: Path, arguments: Sequence[str], fds: tuple[int, int, int]) -> None:
    """Run launch.py, which becomes the helper, or leaves it behind. launch.py gets a session of its own, since the
    helper must outlive a Ctrl-C: the helper ends with its owner. Raises OSError.
    """
    environment = dict(os.environ)
    if environment.get(SOCKET_VARIABLE):
        environment[SOCKET_VARIABLE] = absolute_path(environment[SOCKET_VARIABLE])
    command = launch_command("helper", *arguments)
    try:
        output = run_detached(command, environment, fds, START_SECONDS)
    except (ImportError, OSError) as error:  # a filter of system calls may refuse `run_detached`
        if is_from_job(error):
            raise
        _launch_child([*command, "child"], fds, environment)
        return
    if output is None:
        raise OSError(f"{command[0]} does not start within {START_SECONDS:.0f} s")
    if not mode_of(directory / PAGE_NAME, follow=False):
        raise OSError(f"{command[0]} cannot run {_LAUNCH}")


def launch_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of cachefs.publishing in a process beside this one (see launch.py)."""
    return [os.environ.get(PYTHON_VARIABLE) or sys.executable, "-I", "-S", str(_LAUNCH), module, *arguments]


def run_detached(
    command: Sequence[str], environment: Mapping[str, str], fds: Sequence[int], seconds: float
) -> bytes | None:
    """Run a program that is no child of this process, and return its first output.

    The program gets *fds*, three at most, and the descriptor of a pipe whose number follows its arguments. Returns the
    first bytes that it writes to the pipe, empty where it has ended without writing; None where it was killed after
    *seconds* without output. Raises OSError where the program cannot be run, and ImportError where there was no
    compiler when cachefs was installed.
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
            if is_from_job(error):
                raise
            raise OSError(error.errno, os.strerror(error.errno or 0), command[0]) from None
        finally:
            os.close(writer)
        if _wait_until_ready(reader, select.POLLIN, seconds):
            return os.read(reader, select.PIPE_BUF)
        with suppress_own(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
        return None
    finally:
        os.close(reader)


def _launch_child(command: Sequence[str], fds: Sequence[int], environment: dict[str, str]) -> None:
    """Run launch.py as a short-lived child, where `run_detached` is not compiled or is refused. Raises OSError."""
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
        is_started = _wait_until_ready(ended, select.POLLIN, START_SECONDS)
    finally:
        os.close(ended)
    if not is_started:
        started.kill()
    status = started.wait()
    if not is_started:
        raise OSError(f"{command[0]} does not start within {START_SECONDS:.0f} s")
    if status:
        raise OSError(f"{command[0]} cannot run {_LAUNCH} (exit status {status})")
