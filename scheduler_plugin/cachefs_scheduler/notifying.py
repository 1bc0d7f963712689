"""What the service tells systemd (sd_notify(3)): datagrams to $NOTIFY_SOCKET, where there is one."""

import asyncio
import logging
import os
import socket

log = logging.getLogger(__name__)


def notify(state: str) -> None:
    """Send *state*, such as READY=1. A service manager that does not listen is no reason to fail."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
            connection.connect("\0" + address[1:] if address.startswith("@") else address)
            connection.send(state.encode())
    except OSError as error:
        log.warning("cannot notify the service manager at %s: %s", address, error)


async def feed_watchdog() -> None:
    """Runs as long as the service, on its event loop: so systemd restarts one whose loop is stuck."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    meant_for = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    while microseconds.isdigit() and meant_for == str(os.getpid()):
        notify("WATCHDOG=1")
        await asyncio.sleep(int(microseconds) / 2e6)
