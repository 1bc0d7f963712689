"""Registers a mount with its daemon before anything is mounted.

A missing daemon or an unknown dataset is then an error of the command instead of a mount that hangs. A child process
makes the call, since a process that has used gRPC must not fork any more.
"""

import os
import time
from pathlib import Path
from typing import Final

import trio

from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.messages import MountReport, NodeView
from cachefs.mount.child_process import fork
from cachefs.mount.options import MountOptions
from cachefs.mount.reads import fetch_channel
from cachefs.rpc import REPORT, DaemonClient, encode, response_decoder

_TIMEOUT: Final = 5.0
# The first byte of the child's answer. After it comes the daemon's reply, or the text of the error.
_OK: Final = b"+"
_ERROR: Final = b"-"


def register_mount(options: MountOptions, report: MountReport) -> NodeView:
    """Report the mount to the daemon. Returns the daemon's view of its node. Raises CachefsError."""
    reader, writer = os.pipe()

    def ask() -> None:
        try:
            answer = _OK + encode(_call_daemon(options, report))
        except CachefsError as error:
            answer = _ERROR + str(error).encode()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer)

    pid = fork("attach", Path(report.mountpoint), ask)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    if answer.startswith(_OK):
        return response_decoder(NodeView)(answer[1:])
    raise CachefsError(answer[1:].decode() or "the process that asked the daemon has died; see the log")


def _call_daemon(options: MountOptions, report: MountReport) -> NodeView:
    """Call until the daemon answers, for at most `daemon_wait` seconds: at boot it may start later. Raises
    CachefsError."""
    client = DaemonClient(options.socket)
    deadline = time.monotonic() + options.daemon_wait
    while True:
        try:
            view = client.call(REPORT, report, timeout=_TIMEOUT)
            # Fails here rather than at the first read where the daemon does not serve blocks.
            trio.run(fetch_channel.check_daemon, options.socket)
            return view
        except DaemonUnavailable:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)
