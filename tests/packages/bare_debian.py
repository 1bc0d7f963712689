"""A bare Debian of this machine's release: a directory that debootstrap fills, with mounts and processes of its own."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.waiting import until

MIRROR: Final = "http://deb.debian.org/debian"
SECONDS: Final = 600
# The first process of the namespaces. What it mounts is gone with it.
_FIRST: Final = """
set -e
mount --bind "$1" "$1"
cd "$1"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t tmpfs tmpfs run
mkdir -p dev/shm
mount -t tmpfs tmpfs dev/shm
[ -e dev/fuse ] || mknod -m 666 dev/fuse c 10 229
cp /etc/resolv.conf etc/resolv.conf
printf '#!/bin/sh\\nexit 101\\n' >usr/sbin/policy-rc.d
chmod 755 usr/sbin/policy-rc.d
echo ready
exec chroot . sleep infinity
"""
# These change with every package that is installed or removed, whatever it is; and what mount(8) and adduser(8) note.
_OF_THE_SYSTEM: Final = ("var/cache/", "var/lib/apt/", "var/lib/dpkg/", "var/log/", "tmp/", "run/mount", "run/adduser")
_ENVIRONMENT: Final = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive",
}  # fmt: skip


class BareDebian:
    """Commands run in it as root, and see nothing else of this machine than its network."""

    def __init__(self, root: Path, first: int) -> None:
        self.root = root
        self._enter = [
            "nsenter", f"--target={first}", "--mount", "--pid", f"--root=/proc/{first}/root",
            f"--wd=/proc/{first}/root",
        ]  # fmt: skip

    def start(self, *command: str) -> "subprocess.Popen[str]":
        """What it prints is in one stream."""
        return subprocess.Popen(
            [*self._enter, *command], env=_ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, *command: str, status: int = 0, seconds: int = SECONDS) -> str:
        """What it prints; it must end with that status, within so many seconds."""
        process = self.start(*command)
        printed, _ = process.communicate(timeout=seconds)
        assert process.returncode == status, f"{command} ended with {process.returncode}:\n{printed}"
        return printed

    def files(self) -> set[str]:
        """All paths, but those that are the business of apt and dpkg."""
        found = self.run("sh", "-c", "find / -path /proc -prune -o -path /sys -prune -o -printf '%P\\n'").splitlines()
        return {path for path in found if not path.startswith(_OF_THE_SYSTEM)}


def _wait_until_inside(first: int) -> None:
    """Only then its root is the directory."""
    until(lambda: Path(f"/proc/{first}/comm").read_text() == "sleep\n")


@contextmanager
def bare_debian(root: Path) -> Iterator[BareDebian]:
    """Fills *root*, which must be empty. Nothing runs and nothing is mounted in it afterwards."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    subprocess.run(
        ["debootstrap", "--variant=minbase", release["VERSION_CODENAME"], root, MIRROR],
        stdout=subprocess.DEVNULL, timeout=SECONDS, check=True,
    )  # fmt: skip
    outer = subprocess.Popen(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _FIRST, "sh", root],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert outer.stdout is not None
        assert outer.stdout.readline() == "ready\n"
        first = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text())
        _wait_until_inside(first)
        yield BareDebian(root, first)
    finally:
        outer.kill()
        outer.wait()
        assert not any(f" {os.fspath(root)}" in line for line in Path("/proc/self/mountinfo").read_text().splitlines())
