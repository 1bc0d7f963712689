"""The process of the pusher, forked by a mount's supervisor."""

import contextlib
import ctypes
import logging
import os
import signal
import threading
from typing import Final

from cachefs.mount.device import FuseConnection
from cachefs.mount.push import pages
from cachefs.mount.push.pusher import Pusher, PusherSettings

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
# Where readers leave no processor idle, a file that is pushed in time costs 100 us of a processor, and a file that a
# reader finds missing 160 us. With two readers at full speed on two processors, 60 % of the files were pushed in time
# without a raised priority, and 85 % with it.
_NICENESS: Final = -5


def run_pusher(settings: PusherSettings, connection: FuseConnection, parent: int) -> None:
    """Push until the mount has ended; to be called in a separate process.

    connection: the mount's; it is ended, with this process, when process *parent*, the supervisor, has died.
    """
    _end_with_parent(parent, connection, settings.device)
    threading.excepthook = _exit_on_failure
    with contextlib.suppress(PermissionError):  # in the mount of an ordinary user
        os.nice(_NICENESS)
    Pusher(settings).run()


def _end_with_parent(parent: int, connection: FuseConnection, device: int) -> None:
    """Have the mount's connection, and this process, end when *parent* has died.

    A kill would not suffice. A thread of this process may wait for a page that a reader has locked, and whose request
    no worker has taken yet. The thread cannot die before that request is answered; and as long as the thread lives this
    process holds the device, so the kernel goes on waiting for an answer.
    """
    # After the end of this mount, another mount on the directory may have been given the same number.
    is_ours = not pages.has_mount_ended(device, 0)

    def follow(*_: object) -> None:
        if os.getppid() != parent:
            if is_ours:
                connection.abort()
            os._exit(1)

    # This signal also reaches a stopped process; all processes of the mount may have been stopped.
    signal.signal(signal.SIGCONT, follow)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    follow()


def _exit_on_failure(failure: threading.ExceptHookArgs) -> None:
    """End the process where a thread fails, as its orders would never finish. The supervisor starts another pusher."""
    log.critical("a thread of the pusher failed", exc_info=failure.exc_value)
    logging.shutdown()
    os._exit(1)
