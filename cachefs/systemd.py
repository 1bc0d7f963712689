"""What a daemon or service tells systemd (sd_notify(3)): datagrams to $NOTIFY_SOCKET, where there is one."""

import asyncio
import logging
import os
import socket
import time
from typing import Final

log = logging.getLogger(__name__)

# Seconds that a start may stand still once it has asked for more time, and between two times that it asks.
STILL_SECONDS: Final = 900
ASK_SECONDS: Final = 10.0


def notify(state: str) -> None:
    """Send *state*, such as READY=1. A service manager that does not listen is no reason to fail."""
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


class StartTime:
    """Asks for more time while a start makes progress, so TimeoutStartSec bounds a start that stands still."""

    def __init__(self) -> None:
        self._asks_at = time.monotonic() + ASK_SECONDS

    def went_on(self) -> None:
        """The start has made progress. It may be called any number of times."""
        now = time.monotonic()
        if now >= self._asks_at:
            self._asks_at = now + ASK_SECONDS
            notify(f"EXTEND_TIMEOUT_USEC={STILL_SECONDS * 1_000_000}")


def watchdog_interval() -> float | None:
    """Seconds between two signs of life: half of what systemd allows. None where systemd does not watch."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    meant_for = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    if not microseconds.isdigit() or meant_for != str(os.getpid()):
        return None
    return int(microseconds) / 2e6


async def feed_watchdog() -> None:
    """Runs as long as the process, on its event loop: so systemd restarts one whose loop is stuck."""
    interval = watchdog_interval()
    while interval:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval)
