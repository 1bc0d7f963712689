"""Unmounting, where the system's own command does not end."""

import os
import subprocess
from pathlib import Path

import pytest

from cachefs.errors import CachefsError
from cachefs.mount import kernel


def test_a_command_that_does_not_die_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("umount", "fusermount3"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 1000\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(kernel, "UNMOUNT_SECONDS", 0.5)
    killed: list[subprocess.Popen[str]] = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda child: killed.append(child))  # as if it hung in the kernel
    with pytest.raises(CachefsError, match="has not ended within"):
        kernel.unmount(Path("/nowhere"), lazy=True)
    (child,) = killed
    assert child.poll() is None
    os.kill(child.pid, 9)
    child.wait(20)
