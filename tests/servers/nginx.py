"""nginx (Debian `nginx`) over a directory. It starts in 0.05 s, gives ETags, and knows ranges and If-Match."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cachefs_bench.lab.ports import free_port
from tests.servers.process import start, stop, wait_for_port

_CONFIGURATION = """
daemon off; master_process off; pid {home}/pid; error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {home}/a; proxy_temp_path {home}/b; fastcgi_temp_path {home}/c;
    uwsgi_temp_path {home}/d; scgi_temp_path {home}/e;
    server {{ listen 127.0.0.1:{port}; root {directory}; }}
}}
"""


@contextmanager
def running(directory: Path) -> Iterator[str]:
    """Serve *directory* at the URL."""
    binary = shutil.which("nginx", path="/usr/sbin:/usr/bin")
    if binary is None:
        raise RuntimeError("nginx is missing: apt-get install nginx")
    with tempfile.TemporaryDirectory(prefix="nginx-") as home:
        port, log = free_port(), Path(home, "log")
        configuration = Path(home, "conf")
        configuration.write_text(_CONFIGURATION.format(home=home, port=port, directory=directory))
        process = start([binary, "-c", str(configuration), "-e", "stderr"], log)
        try:
            wait_for_port(port, process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            stop(process)
