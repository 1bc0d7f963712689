"""nginx over a directory: answers GETs with ETag and ranges so quickly that the client is the bottleneck. It ignores
signatures."""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cachefs_tools.child_programs import run_program, wait_until

_CONFIGURATION: Final = """
{user}
worker_processes 1;
daemon off;
pid {work}/pid;
error_log {work}/log;
events {{ worker_connections 512; }}
http {{
    access_log off;
    sendfile on;
    keepalive_requests 10000000;
    client_body_temp_path {work}/body;
    proxy_temp_path {work}/proxy;
    fastcgi_temp_path {work}/fastcgi;
    uwsgi_temp_path {work}/uwsgi;
    scgi_temp_path {work}/scgi;
    server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


def find_nginx() -> str | None:
    """Return the path of nginx, or None."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextmanager
def run_static_server(program: str, root: Path, work: Path) -> Iterator[str]:
    """Run nginx over the directory *root*, with its own files in *work*. Yields its URL."""
    work.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # As root, nginx would switch to a user without access to temporary directories.
    user = "user root;" if os.geteuid() == 0 else ""
    configuration = work / "nginx.conf"
    configuration.write_text(_CONFIGURATION.format(user=user, work=work, port=port, root=root))
    log = work / "output"

    def answers() -> bool:
        with socket.socket() as attempt:
            return attempt.connect_ex(("127.0.0.1", port)) == 0

    with run_program([program, "-p", str(work), "-c", str(configuration)], log) as process:
        wait_until(answers, process, log)
        yield f"http://127.0.0.1:{port}"
