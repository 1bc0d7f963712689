"""`python -m cachefs.mount.push`: what a mount's supervisor starts beside its workers. Not for users."""

import argparse
import contextlib
import ctypes
import logging
import logging.handlers
import os
import signal
import threading
from pathlib import Path
from typing import Final

from cachefs.mount import kernel, read_marks
from cachefs.mount.cli import log_to
from cachefs.mount.device import Connection
from cachefs.mount.push.pusher import Pusher, PusherSettings
from cachefs.mount_spec import MountSpec
from cachefs.sizes import parse_share

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
# A file from the SSD tier takes a thread 50 us of processor and 130 us of waiting, which other threads use.
_MOST_THREADS: Final = 4
# Where readers leave no processor idle, each file that we push in time costs 100 us of it, and each that a reader
# finds missing 160. With two readers at full speed on two processors the share in time was 0.6, and is 0.85.
_NICENESS: Final = -5


def main() -> None:
    given = _arguments()
    _end_with(given.parent, given.directory.absolute())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the supervisor, which unmounts
    log_to(_handler(given.log), logging.DEBUG if given.verbose else logging.INFO)
    threading.excepthook = _die
    with contextlib.suppress(PermissionError):  # where an ordinary user has mounted
        os.nice(_NICENESS)
    marks = read_marks.create() if given.marks is None else given.marks
    settings = PusherSettings(
        given.device, marks, given.spec, given.directory, given.mount, given.socket, parse_share(given.budget),
        given.threads,
    )  # fmt: skip
    try:
        Pusher(settings).run()
    except Exception:
        log.exception("the pusher of %s failed", given.directory)
        _exit(1)
    # Threads may be in a read of our own mount or wait for a page, and there is nothing to put in order.
    _exit(0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cachefs.mount.push")
    parser.add_argument("--device", type=int, required=True, help="descriptor, open on the mount's FUSE connection")
    parser.add_argument("--spec", type=MountSpec.parse, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--mount", required=True, help="the mount's id in its reports")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--budget", required=True, help="a size, or a share of the available memory")
    parser.add_argument("--threads", type=int, default=min(_MOST_THREADS, len(os.sched_getaffinity(0))))
    parser.add_argument("--marks", type=int, help="descriptor of what the workers have read")
    parser.add_argument("--parent", type=int, default=os.getppid())
    parser.add_argument("--log", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true")
    return parser.parse_args()


def _end_with(parent: int, directory: Path) -> None:
    """See to it that the connection ends when *parent* dies, and we with it.

    Being killed would not do: a thread of ours may wait for a page that a reader has locked, whose request nobody has
    taken yet. It cannot die before that is answered, and holds the device, so the kernel would wait for an answer.
    """
    number = kernel.connection_number(directory)
    connection = Connection(number, directory) if number is not None else None

    def follow(*_: object) -> None:
        if os.getppid() != parent:
            if connection is not None:
                connection.abort()
            os._exit(1)

    signal.signal(signal.SIGUSR1, follow)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    follow()


def _handler(path: Path | None) -> logging.Handler:
    if path is not None:
        return logging.FileHandler(path)
    if os.path.samestat(os.fstat(2), os.stat(os.devnull)) and os.path.exists("/dev/log"):
        return logging.handlers.SysLogHandler("/dev/log")
    return logging.StreamHandler()


def _die(failure: threading.ExceptHookArgs) -> None:
    """A thread less would leave orders undone for ever; the supervisor starts a new pusher."""
    log.critical("a thread of the pusher failed", exc_info=failure.exc_value)
    _exit(1)


def _exit(status: int) -> None:
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
