"""[metrics] of the configuration: where Prometheus reads what the daemon counts."""

import ipaddress
import os
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from cachefs.socket_path import MAX_SOCKET_PATH
from cachefs_daemon.section import Section

UNIX: Final = "unix:"
_EXPECTED: Final = 'expected a port on loopback, such as "127.0.0.1:9568", or "unix:/run/cachefs/metrics.sock"'


def split_listen(value: str) -> tuple[str, int]:
    """Host and port. Raises ValueError saying how to write it."""
    host, _, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise ValueError(_EXPECTED)
    return host, int(port)


def _listen(value: str) -> str:
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
        raise ValueError(f"{_EXPECTED}; for other machines run a collector on this one, see docs/monitoring.md")
    return value


class MetricsSection(Section):
    """[metrics]: what Prometheus is told, and where."""

    listen: Annotated[str, AfterValidator(_listen)] = ""
    datasets: Annotated[int, Field(ge=0, le=200)] = 20
