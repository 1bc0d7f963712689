"""`python -m cachefs.mount.push`, which a mount's supervisor starts beside its workers. It is not for users."""

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Final

from cachefs.mount import read_marks
from cachefs.mount.cli import Syslog, log_to
from cachefs.mount.device import Connection
from cachefs.mount.push import pages
from cachefs.mount.push.pusher import Pusher, PusherSettings
from cachefs.mount_spec import MountSpec
from cachefs.sizes import parse_share

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
# A file from the SSD tier takes a thread 50 us of a processor and 130 us of waiting, in which other threads work.
_MOST_THREADS: Final = 4
# Where readers leave no processor idle, a file that is pushed in time costs 100 us of a processor, and one that a
# reader finds missing 160 us. With two readers at full speed on two processors, 60 % of the files were pushed in time
# without this, and 85 % with it.
_NICENESS: Final = -5


def main() -> None:
    given = _arguments()
    _end_with(given.parent, Connection(given.connection, given.directory.absolute()), given.device)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is meant for the supervisor, which unmounts
    log_to(_handler(given.log), logging.DEBUG if given.verbose else logging.INFO)
    threading.excepthook = _die
    with contextlib.suppress(PermissionError):  # an ordinary user has mounted
        os.nice(_NICENESS)
    marks = read_marks.create() if given.marks is None else given.marks
    settings = PusherSettings(
        given.device, marks, given.spec, given.directory, given.mount, given.socket, parse_share(given.budget),
        given.threads, not given.only_check,
    )  # fmt: skip
    try:
        Pusher(settings).run()
    except Exception:
        log.exception("the pusher of %s failed", given.directory)
        _exit(1)
    # Not by returning: threads may be in a read of our own mount or wait for a page. Nothing is left to be done.
    _exit(0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cachefs.mount.push")
    parser.add_argument("--device", type=int, required=True, help="descriptor, open on the mount's FUSE connection")
    parser.add_argument("--connection", type=int, required=True, help="the kernel's number of that connection")
    parser.add_argument("--spec", type=MountSpec.parse, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--mount", required=True, help="the mount's id in its reports")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--budget", required=True, help="a size, or a share of the available memory")
    parser.add_argument("--only-check", action="store_true", help="store and drop nothing: say which pages are there")
    parser.add_argument("--threads", type=int, default=min(_MOST_THREADS, len(os.sched_getaffinity(0))))
    parser.add_argument("--marks", type=int, help="descriptor of what the workers have read")
    parser.add_argument("--parent", type=int, default=os.getppid())
    parser.add_argument("--log", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true")
    return parser.parse_args()


def _end_with(parent: int, connection: Connection, device: int) -> None:
    """Have the connection of the mount, and this process, end when *parent* has died.

    It would not do to be killed. A thread of this process may wait for a page that a reader has locked, and whose
    request nobody has taken yet. The thread cannot die before that request is answered; and as long as it lives this
    process holds the device, so the kernel goes on waiting for an answer.
    """
    # A mount that was made on the directory since our own one has died may have been given the same number.
    is_ours = not pages.is_gone(device, 0)

    def follow(*_: object) -> None:
        if os.getppid() != parent:
            if is_ours:
                connection.abort()
            os._exit(1)

    # This signal also reaches a process that is stopped, as all processes of the mount may have been.
    signal.signal(signal.SIGCONT, follow)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    follow()


def _handler(path: Path | None) -> logging.Handler:
    if path is not None:
        return logging.FileHandler(path)
    if os.path.samestat(os.fstat(2), os.stat(os.devnull)) and os.path.exists("/dev/log"):
        return Syslog("/dev/log")
    return logging.StreamHandler()


def _die(failure: threading.ExceptHookArgs) -> None:
    """End the process where a thread fails, whose orders would never be done. The supervisor starts another pusher."""
    log.critical("a thread of the pusher failed", exc_info=failure.exc_value)
    _exit(1)


def _exit(status: int) -> None:
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
