"""Set-ups of what a job does with its own process: descriptors, signals, standard error, threads, children."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from tests.node.equivalence import datasets as d
from tests.node.equivalence.setups import BATCH, SetUp, plain, read, say


def loader(root: str, **options: Any) -> Any:
    return DataLoader(d.Listed(root), BATCH, shuffle=True, **options)


def closed(root: str) -> None:
    """A job that closes all descriptors but three after a loader was used, and opens sockets of its own."""
    made = loader(root)
    read(made, 1)
    os.closerange(3, 1024)
    pairs = [socket.socketpair() for _ in range(8)]
    for one in (end for pair in pairs for end in pair):
        one.setblocking(False)
    read(made, 2)
    for number, one in enumerate(end for pair in pairs for end in pair):
        with contextlib.suppress(BlockingIOError):
            say(number, "received", one.recv(200))
        say(number, os.get_blocking(one.fileno()))
        one.close()


def daemonized(root: str) -> None:
    """The double fork of every recipe for daemons, in which log files get the numbers of what was closed."""
    made = loader(root)
    read(made, 1)
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        os.waitpid(child, 0)
        while os.read(reader, 100):
            pass
        say([Path(f"log{number}").read_text() for number in range(8)])
        os.close(reader)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.dup2(writer, 3)
    os.closerange(4, 1024)
    logs = [os.open(f"log{number}", os.O_WRONLY | os.O_CREAT) for number in range(8)]
    read(loader(root), 2)
    del made
    gc.collect()
    for log in logs:
        os.write(log, b"the job's")
    os._exit(0)


def standard_error(after: Callable[[int, int], None]) -> SetUp:
    """A job with the default action of SIGPIPE, whose standard error is a pipe."""

    def run(root: str) -> None:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        reader, writer = os.pipe()
        os.dup2(writer, 2)
        after(reader, writer)
        from tests.node.equivalence.warm_process import begin_with_stderr

        begin_with_stderr()
        for _ in range(3):
            read(loader(root), 1)
            time.sleep(0.5)  # the helper has something to say by now
        sys.stderr = None

    return run


def gone(reader: int, writer: int) -> None:
    os.close(reader)
    os.close(writer)


def full(reader: int, writer: int) -> None:
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)


class Tee:
    """Writes to a log too, under a lock, as many such classes do; the collector may run in there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: list[str] = []

    def write(self, text: str) -> None:
        with self._lock:
            self._lines.append(text)
            gc.collect()

    def flush(self) -> None:
        with self._lock:
            say("flushed", self._lines)


class Trainer:
    """Is part of a cycle."""

    def __init__(self, made: Any) -> None:
        self.loader, self.me = made, self


def tee(root: str) -> None:
    sys.stderr = Tee()  # type: ignore[assignment]
    for number in range(3):
        trainer = Trainer(loader(root))
        iterator = iter(trainer.loader)
        say(plain(next(iterator)))
        time.sleep(0.5)  # the helper has something to say by now
        del trainer, iterator
        print("epoch", number, file=sys.stderr, flush=True)


def collected_anywhere(root: str) -> None:
    """The collector runs while a lock is held that the job's own finalizers, audit hooks and signal handlers take."""
    lock = threading.Lock()

    def audit(event: str, _: Any) -> None:
        if event in ("os.remove", "os.unlink", "socket.connect", "subprocess.Popen") and lock.locked():
            say("in the collector:", event)

    sys.addaudithook(audit)
    for _ in range(3):
        trainer = Trainer(DataLoader(d.Hidden(root), BATCH, num_workers=1))
        for _batch in trainer.loader:
            pass
        del trainer, _batch
        with lock:
            gc.collect()


def two_threads(root: str) -> None:
    """The first two loaders of a process, begun at the same moment."""
    barrier = threading.Barrier(2)
    found: dict[int, Any] = {}

    def go(number: int) -> None:
        made = DataLoader(d.Listed(root), BATCH + number)
        barrier.wait()
        found[number] = [plain(batch) for _ in range(3) for batch in made]

    threads = [threading.Thread(target=go, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say(found[0], found[1])


def any_child(root: str) -> None:
    """A thread reaps whatever child there is, and the job counts SIGCHLD."""
    came: list[int] = []
    signal.signal(signal.SIGCHLD, lambda number, frame: came.append(number))
    over = threading.Event()
    reaped: list[Any] = []

    def reap() -> None:
        while not over.wait(0.0005):
            with contextlib.suppress(ChildProcessError):
                reaped.append(os.waitpid(-1, os.WNOHANG))

    thread = threading.Thread(target=reap)
    thread.start()
    read(loader(root))
    time.sleep(0.5)
    over.set()
    thread.join()
    say(len(came), [status for child, status in reaped if child])


def programs(root: str) -> None:
    """Programs that the job starts and that are no Pythons: one with a sanitizer refuses any preloaded library."""
    read(loader(root))
    said = subprocess.run(["env"], stdout=subprocess.PIPE, check=True, text=True).stdout
    say(sorted(line for line in said.splitlines() if line.startswith("LD_")))
    pipes = "yes | head -n 1; trap"
    say(subprocess.run(["sh", "-c", pipes], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True).stdout)


def fork_server(root: str) -> None:
    """Loaders of several datasets whose workers come from one server, which was started before any of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.utils.data"])
    first = context.Process(target=print, args=("the first",))
    first.start()
    first.join()
    loaders = [
        DataLoader(dataset, BATCH, num_workers=1, persistent_workers=keeps, multiprocessing_context=context)
        for dataset in (d.Hidden(root), d.Listed(root))
        for keeps in (False, True)
    ]
    for _ in range(2):
        for made in loaders:
            read(made, 1)


def alarms(root: str) -> None:
    """Timeouts of every kind of exception, in a tight loop of opens: each has to come."""
    files = [path for path, _ in d.Listed(root).samples[:20]]
    kinds = (TimeoutError, RuntimeError, OSError, ValueError, KeyError)
    caught = fired = 0

    def ring(*_: Any) -> None:
        nonlocal fired
        fired += 1
        raise kinds[fired % len(kinds)]

    class Timed:
        def __len__(self) -> int:
            return 300

        def __getitem__(self, index: int) -> int:
            nonlocal caught
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002)
                for path in 5 * files:
                    Path(path).open("rb").close()
                time.sleep(1)
            except kinds:
                caught += 1
            return index

    signal.signal(signal.SIGALRM, ring)
    for _ in DataLoader(Timed(), batch_size=8):  # type: ignore[arg-type]
        pass
    say(fired, caught)


class Late(Exception):
    """Another thread raises it here."""


def timeouts_by_a_thread(root: str) -> None:
    """Timeouts that another thread raises in this one, in a tight loop of opens: each has to come."""
    files = [path for path, _ in d.Listed(root).samples[:20]]
    main, begun, fired, caught = threading.get_ident(), threading.Semaphore(0), 0, 0

    def fire() -> None:
        nonlocal fired
        while begun.acquire() and fired < 300:
            time.sleep(0.0002 + fired % 97 * 3e-6)
            fired += 1
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(Late))

    class Timed:
        def __len__(self) -> int:
            return 300

        def __getitem__(self, index: int) -> int:
            nonlocal caught
            try:
                begun.release()
                end = time.monotonic() + 1
                while time.monotonic() < end:
                    for path in files:
                        Path(path).open("rb").close()
            except Late:
                caught += 1
            return index

    thread = threading.Thread(target=fire)
    thread.start()
    for _ in DataLoader(Timed(), batch_size=8):  # type: ignore[arg-type]
        pass
    begun.release()
    thread.join()
    say(fired, caught)


PROCESS_SETUPS: dict[str, SetUp] = {
    "closed": closed,
    "daemonized": daemonized,
    "stderr-gone": standard_error(gone),
    "stderr-full": standard_error(full),
    "tee": tee,
    "collected-anywhere": collected_anywhere,
    "two-threads": two_threads,
    "any-child": any_child,
    "alarms": alarms,
    "timeouts-by-a-thread": timeouts_by_a_thread,
    "programs": programs,
    "fork-server": fork_server,
}
