"""Started by the daemon, with one end of a channel. It ends with the daemon, in whatever way that ends."""

import argparse
import asyncio
import contextlib
import ctypes
import os
import signal
import socket
from pathlib import Path
from typing import Final

from cachefs_daemon.fetch_process.carrier import Carrier
from cachefs_daemon.fetch_process.channel import Channel
from cachefs_daemon.fetch_process.frames import Batch, Report
from cachefs_daemon.runtime import collector

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cachefs_daemon.fetch_process", description=__doc__)
    parser.add_argument("--channel", type=int, required=True, help="Descriptor of the socket to the daemon.")
    parser.add_argument("--parent", type=int, required=True, help="Process id of the daemon.")
    parser.add_argument("--longest", type=float, required=True, help="Seconds after which an object is given up.")
    arguments = parser.parse_args()
    # Those are for the daemon, which ends this process when it does not need it any more.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Where memory is short, the kernel is to end this process, which loses nothing, before the daemon.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("300")
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, b"cachefs-fetch")
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != arguments.parent:
        return
    asyncio.run(_serve(socket.socket(fileno=arguments.channel), arguments.longest))


async def _serve(link: socket.socket, longest: float) -> None:
    collector.settle()
    # Nothing is to be waited for in the end, such as a thread that asks a name server.
    Carrier(Channel[Report, Batch](link, Batch), longest, ended=lambda: os._exit(0)).start()
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    main()
