"""The daemon's systemd unit, as systemd itself judges it."""

import subprocess
import sys
from pathlib import Path

import pytest

import cachefs_daemon

UNIT = Path(cachefs_daemon.__file__).with_name("cachefsd.service")
MOST_EXPOSED = 40  # tenths: 4.0 of 10


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit as an administrator sets it up: with the full path of the program."""
    found = tmp_path / UNIT.name
    program = Path(sys.executable).with_name("cachefsd")
    found.write_text(UNIT.read_text().replace("ExecStart=cachefsd", f"ExecStart={program}"))
    return found


def analyzed(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", "--no-pager", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_systemd_understands_every_line(unit: Path) -> None:
    done = analyzed("verify", "--man=no", "--recursive-errors=no", unit)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_daemon_is_exposed_little(unit: Path) -> None:
    done = analyzed("security", "--offline=yes", f"--threshold={MOST_EXPOSED}", unit)
    assert done.returncode == 0, done.stdout


def test_what_the_daemon_must_see_and_write_is_left_to_it(unit: Path) -> None:
    """It looks at processes and users of the whole machine, and writes /dev/shm."""
    text = unit.read_text()
    for taken in ("PrivateUsers=", "ProtectProc=", "ProcSubset=", "PrivateIPC=", "PrivateNetwork="):
        assert f"\n{taken}" not in text
