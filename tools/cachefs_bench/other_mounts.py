"""Other ways to mount a bucket, for comparisons: `rclone mount` and `s3fs`, where they are installed."""

import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cachefs_tools.child_programs import run_program, wait_until

from cachefs.mount import kernel
from cachefs_bench.origin_server import OriginServer

RCLONE: Final = "rclone"
S3FS: Final = "s3fs"


def installed_programs() -> dict[str, str]:
    """Return the installed programs, by name."""
    paths = {RCLONE: f"{sysconfig.get_path('scripts')}:/usr/local/bin:/usr/bin", S3FS: "/usr/local/bin:/usr/bin"}
    found = {name: shutil.which(name, path=path) for name, path in paths.items()}
    return {name: program for name, program in found.items() if program}


@contextmanager
def mount_bucket(name: str, program: str, server: OriginServer, work: Path) -> Iterator[Path]:
    """Mount the server's bucket with a program in the new directory *work*, with its cache there."""
    directory, log = work / "mnt", work / f"{name}.log"
    directory.mkdir(parents=True)
    command = {RCLONE: _rclone, S3FS: _s3fs}[name](program, server, work, directory)
    try:
        with run_program(command, log) as process:
            wait_until(directory.is_mount, process, log)
            yield directory
    finally:
        if directory.is_mount():
            kernel.unmount(directory, lazy=True)


def _rclone(program: str, server: OriginServer, work: Path, directory: Path) -> list[str]:
    account = server.credentials
    remote = (
        f":s3,provider=Other,force_path_style=true,region=us-east-1,endpoint='{server.endpoint}',"
        f"access_key_id='{account.access_key}',secret_access_key='{account.secret_key}':{server.bucket}"
    )
    return [program, "mount", remote, str(directory), "--config", "/dev/null", "--read-only",
            "--vfs-cache-mode", "full", "--cache-dir", str(work / "cache"), "--dir-cache-time", "1h"]  # fmt: skip


def _s3fs(program: str, server: OriginServer, work: Path, directory: Path) -> list[str]:
    secret = work / "passwd"
    secret.touch(0o600)
    secret.write_text(f"{server.credentials.access_key}:{server.credentials.secret_key}\n")
    options = f"url={server.endpoint},use_path_request_style,passwd_file={secret},endpoint=us-east-1,sigv4,ro"
    return [program, server.bucket, str(directory), "-f", "-o", options]
