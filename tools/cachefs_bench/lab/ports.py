"""Chooses ports for servers that cannot use port 0, since their configuration names the port.

A merely free port may be given to two processes at the same time, and to any connection made before the server listens.
So a port is claimed until the process ends, in a file shared by all processes of a user, and is outside the range from
which the kernel takes ports.
"""

import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import Final

from cachefs.errors import CachefsError

# Shared by all processes of a user. The lock of byte N is the claim of port N.
_CLAIMS: Final = Path(tempfile.gettempdir()) / f"cachefs-ports-{os.getuid()}.lock"
_KERNEL_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST: Final = 10_000
_LAST: Final = 30_000
_claims = -1  # descriptor of the file: closing any descriptor of the file in this process would drop all claims
_next = 0  # number of ports tried so far


def free_port() -> int:
    """Return a free loopback port, claimed by this process."""
    return free_ports(1)[0]


def free_ports(count: int, address: str = "127.0.0.1") -> range:
    """Return *count* free ports in a row on *address*, claimed by this process. Raises CachefsError."""
    global _next
    ports = _range()
    for _ in range(len(ports)):
        # Concurrent processes start at different ports.
        first = ports[(os.getpid() * 97 + _next) % (len(ports) - count)]
        _next += 1
        if all(_claim(port) and _is_free(address, port) for port in range(first, first + count)):
            _next += count - 1
            return range(first, first + count)
    raise CachefsError(f"no {count} free ports in a row on {address}, from {ports[0]} to {ports[-1]}")


def _range() -> range:
    low = int(_KERNEL_RANGE.read_text().split()[0])
    # If the kernel uses the whole range, claims still keep servers apart.
    return range(_FIRST, min(_LAST, low)) if low > _FIRST + 1000 else range(_FIRST, _LAST)


def _claim(port: int) -> bool:
    """Claim the port for this process, which may claim a port repeatedly; a fork inherits no claim."""
    global _claims
    if _claims < 0:
        try:
            _claims = os.open(_CLAIMS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise CachefsError(f"{_CLAIMS}: {error.strerror}; set TMPDIR to a directory of your own") from None
    try:
        fcntl.lockf(_claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:  # EAGAIN or EACCES
        return False
    return True


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True
