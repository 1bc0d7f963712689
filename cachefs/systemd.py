"""Notifies systemd (sd_notify(3)) by datagrams to $NOTIFY_SOCKET, where it is set."""

import asyncio
import logging
import os
import socket
import time
from typing import Final

log = logging.getLogger(__name__)

# Maximum seconds without progress after a start has asked for more time, and minimum seconds between two requests.
EXTENSION_SECONDS: Final = 900
EXTENSION_INTERVAL_SECONDS: Final = 10.0


def notify_systemd(state: str) -> None:
    """Send *state*, such as READY=1. Only logs where the service manager does not listen."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
            connection.connect(address)
            connection.send(state.encode())
    except OSError as error:
        log.warning("cannot notify the service manager at %s: %s", os.environ["NOTIFY_SOCKET"], error)


class StartupTimer:
    """Asks for more time while a start makes progress, so that TimeoutStartSec limits only a start without progress."""

    def __init__(self) -> None:
        self._next_request_at = time.monotonic() + EXTENSION_INTERVAL_SECONDS

    def extend_timeout(self) -> None:
        """Record that the start has made progress. May be called any number of times."""
        now = time.monotonic()
        if now >= self._next_request_at:
            self._next_request_at = now + EXTENSION_INTERVAL_SECONDS
            notify_systemd(f"EXTEND_TIMEOUT_USEC={EXTENSION_SECONDS * 1_000_000}")


def watchdog_interval() -> float | None:
    """Return the seconds between two heartbeats: half of the limit of systemd; None where systemd does not watch."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    meant_for = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    if not microseconds.isdigit() or meant_for != str(os.getpid()):
        return None
    return int(microseconds) / 2e6


async def feed_watchdog() -> None:
    """Send heartbeats from the process's event loop, so that systemd restarts a process with a stuck loop."""
    interval = watchdog_interval()
    while interval:
        notify_systemd("WATCHDOG=1")
        await asyncio.sleep(interval)
