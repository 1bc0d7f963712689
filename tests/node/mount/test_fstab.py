"""What /etc/fstab says of a mount is taken by mount(8) and by systemd as docs/operations.md has it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import Daemon

DOCUMENT = Path(__file__).parents[3] / "docs/operations.md"
GENERATOR = Path("/usr/lib/systemd/system-generators/systemd-fstab-generator")
# mount(8) looks for the helper in /sbin only. The machine's own /sbin stays as it is: the script sees another one.
IN_A_NAMESPACE = """
set -e
mount -t tmpfs none "$1" && mkdir "$1/upper" "$1/work"
sbin=$(readlink -f /sbin)
mount -t overlay none -o "lowerdir=$sbin,upperdir=$1/upper,workdir=$1/work" "$sbin"
ln -sf "$2" /sbin/mount.cachefs
cd "$3"
mount -a -T "$4" && mount -a -v -T "$4"
echo "now $(grep -c " $5 .* cachefs:tree " /proc/self/mountinfo)"
cat "$5/one"
umount "$5"
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/one").write_text("some bytes\n")
    with Daemon(tmp_path / "node") as running:
        running.add_dataset("tree", f"file://{tmp_path}/tree")
        yield running


@pytest.mark.skipif(os.geteuid() != 0, reason="mount(8) takes root")
def test_everything_may_be_mounted_twice(daemon: Daemon, tmp_path: Path) -> None:
    elsewhere, directory, layers = tmp_path / "elsewhere", tmp_path / "mnt", tmp_path / "layers"
    (elsewhere / "tree").mkdir(parents=True)  # for which mount(8) would take a SPEC without prefix
    directory.mkdir()
    layers.mkdir()
    fstab = tmp_path / "fstab"
    fstab.write_text(f"cachefs:tree {directory} cachefs defaults,_netdev,nofail,socket={daemon.socket} 0 0\n")
    helper = Path(sys.executable).with_name("mount.cachefs")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", IN_A_NAMESPACE, "sh", layers, helper, elsewhere, fstab, directory],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "already mounted" in done.stdout
    assert done.stdout.endswith("now 1\nsome bytes\n")


def test_systemd_mounts_after_the_daemon_and_does_not_unmount_with_it(tmp_path: Path) -> None:
    assert GENERATOR.exists(), "install systemd"
    lines = re.findall(r"^ +(cachefs:\S+ +/\S+ +cachefs .*)$", DOCUMENT.read_text(), re.MULTILINE)
    assert lines
    (tmp_path / "fstab").write_text("\n".join(lines) + "\n")
    units = [tmp_path / name for name in ("normal", "early", "late")]
    for directory in units:
        directory.mkdir()
    environment = {**os.environ, "SYSTEMD_FSTAB": str(tmp_path / "fstab")}
    subprocess.run([GENERATOR, *units], env=environment, check=True, timeout=30)
    written = [path.read_text() for path in units[0].glob("*.mount")]
    assert len(written) == len(lines)
    for unit in written:
        assert "After=cachefsd.service" in unit
        assert "What=cachefs:" in unit
        assert "Requires=cachefsd" not in unit  # a restart of the daemon would unmount
    assert len(list((units[0] / "remote-fs.target.wants").iterdir())) == len(lines)
