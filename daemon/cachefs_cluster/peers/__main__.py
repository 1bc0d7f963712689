"""A peer server, started by the daemon with what it needs as open descriptors. It ends with the daemon, in whatever way
that ends."""

import argparse
import logging
import os
import socket
import sys
from pathlib import Path

from cachefs.block import TIER_NAMES
from cachefs.errors import CachefsError
from cachefs_cluster.peers.server import open_server
from cachefs_cluster.peers.tls import Certificates, TlsFiles
from cachefs_daemon.runtime import child_process, garbage_collector, logs


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cachefs_cluster.peers", description=__doc__)
    parser.add_argument(
        "--listening", type=int, action="append", required=True, help="Descriptor of a socket that peers connect to."
    )
    parser.add_argument("--pipe", type=int, required=True, help="Descriptor of the pipe to the daemon.")
    parser.add_argument("--fetch", type=int, required=True, help="Descriptor of a connection of the fetch channel.")
    parser.add_argument("--parent", type=int, required=True, help="Process id of the daemon.")
    parser.add_argument("--index", type=Path, required=True, help="Path of the node's index.")
    parser.add_argument("--tier", action="append", default=[], help="NAME=DIRECTORY of a tier.")
    parser.add_argument("--tls", nargs=3, type=Path, metavar=("CA", "CERT", "KEY"), help="Files for TLS, in PEM.")
    arguments = parser.parse_args()
    if not child_process.set_up_child("cachefs-peers", arguments.parent):
        return
    logs.set_up_logging("info")
    tiers = dict(each.split("=", 1) for each in arguments.tier)
    files = TlsFiles(*arguments.tls) if arguments.tls else None
    try:
        server = open_server(
            [socket.socket(fileno=each) for each in arguments.listening],
            socket.socket(fileno=arguments.pipe),
            socket.socket(fileno=arguments.fetch),
            (arguments.index, {TIER_NAMES.index(name): Path(path) for name, path in tiers.items()}),
            lambda: Certificates(files) if files is not None else None,
        )
    except (CachefsError, OSError) as error:
        logging.getLogger("cachefs_cluster.peers").error("the peer server cannot start: %s", error)
        sys.exit(1)
    garbage_collector.freeze_present_objects()
    server.serve()
    os._exit(0)  # threads that serve are not waited for


if __name__ == "__main__":
    main()
