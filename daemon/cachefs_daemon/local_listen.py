"""Addresses for HTTP connections from this machine only: a port on loopback, or a unix socket."""

import ipaddress
import os
from typing import Annotated, Final

from pydantic import AfterValidator

from cachefs.socket_path import MAX_SOCKET_PATH

UNIX: Final = "unix:"
_EXPECTED: Final = 'expected a port on loopback, such as "127.0.0.1:9568", or "unix:/run/cachefs/http.sock"'


def split_listen(value: str) -> tuple[str, int]:
    """Split HOST:PORT. Raises ValueError with the expected format."""
    host, _, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise ValueError(_EXPECTED)
    return host, int(port)


def _check_listen(value: str) -> str:
    if not value:
        return value
    if value.startswith(UNIX):
        path = value.removeprefix(UNIX)
        if not path.startswith("/") or "\0" in path or len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise ValueError(f"{_EXPECTED}; of a path of at most {MAX_SOCKET_PATH} bytes")
        return value
    host, _ = split_listen(value)
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ValueError(f"{_EXPECTED}; other machines are not answered, see docs/monitoring.md for what to do")
    return value


# HOST:PORT of loopback, or unix:/PATH; empty: not served.
LocalListen = Annotated[str, AfterValidator(_check_listen)]
