"""Entry point of the fetch process. The daemon starts it with one end of a channel, and it ends with the daemon."""

import argparse
import asyncio
import os
import socket

from cachefs_daemon.fetch_process.channel import FetchProcessChannel
from cachefs_daemon.fetch_process.downloader import Downloader
from cachefs_daemon.fetch_process.frames import CommandBatch, FetchReport
from cachefs_daemon.origin.request_counters import OWN_COUNTERS
from cachefs_daemon.runtime import child_process, garbage_collector


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cachefs_daemon.fetch_process", description=__doc__)
    parser.add_argument("--channel", type=int, required=True, help="Descriptor of the socket to the daemon.")
    parser.add_argument("--parent", type=int, required=True, help="Process id of the daemon.")
    parser.add_argument("--requests", type=int, required=True, help="Descriptor of memory for counts of requests.")
    parser.add_argument(
        "--longest", type=float, required=True, help="Seconds after which the download of an object is cancelled."
    )
    arguments = parser.parse_args()
    if not child_process.set_up_child("cachefs-fetch", arguments.parent):
        return
    OWN_COUNTERS.use_shared_memory(arguments.requests)
    asyncio.run(_serve(socket.socket(fileno=arguments.channel), arguments.longest))


async def _serve(link: socket.socket, longest: float) -> None:
    garbage_collector.freeze_present_objects()
    # Exit without waiting for threads, such as one that queries a name server.
    Downloader(
        FetchProcessChannel[FetchReport, CommandBatch](link, CommandBatch), longest, on_end=lambda: os._exit(0)
    ).start()
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    main()
