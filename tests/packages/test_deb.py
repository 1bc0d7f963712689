"""The Debian package on a bare Debian: installed, used, upgraded, purged."""

import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.packages.bare_debian import SECONDS, BareDebian, bare_debian

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(1200)]

REPOSITORY = Path(__file__).parents[2]
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "*.so", "build", "dist", "tests")
NEWER = "9.9.9"
# useradd and userdel keep what a file was before their last change.
ACCOUNT_BACKUPS = {f"etc/{name}-" for name in ("passwd", "group", "shadow", "gshadow")}


def built(source: Path, destination: Path) -> Path:
    subprocess.run([source / "tools/packages/build-deb", destination], timeout=SECONDS, check=True)
    (package,) = destination.glob("cachefsd_*.deb")
    return package


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of this tree, and of the same with a higher version."""
    place = tmp_path_factory.mktemp("deb")
    newer = place / "source"
    shutil.copytree(REPOSITORY, newer, ignore=NOT_SOURCE)
    module = newer / "cachefs/__init__.py"
    module.write_text(re.sub(r'__version__ = ".*"', f'__version__ = "{NEWER}"', module.read_text()))
    return built(REPOSITORY, place / "this"), built(newer, place / "newer")


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory, packages: tuple[Path, Path]) -> Iterator[BareDebian]:
    """With all that the package depends on, and some data."""
    with bare_debian(tmp_path_factory.mktemp("debian")) as machine:
        machine.run("apt-get", "-q", "update")
        needed = subprocess.run(
            ["dpkg-deb", "--field", packages[0], "Depends"], capture_output=True, text=True, check=True
        ).stdout.strip()
        machine.run("apt-get", "-qy", "--no-install-recommends", "satisfy", needed)
        for number, package in enumerate(packages):
            shutil.copy(package, machine.root / f"tmp/{number}.deb")
        (machine.root / "srv/photos").mkdir()
        (machine.root / "srv/photos/1.jpg").write_bytes(bytes(range(256)) * 40_000)
        (machine.root / "mnt/photos").mkdir()
        yield machine


@contextmanager
def daemon(machine: BareDebian) -> Iterator[None]:
    process = machine.start("cachefsd")
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "ready on" in line:
            break
    assert process.poll() is None, "".join(said)
    try:
        yield
    finally:
        machine.run("sh", "-c", "kill $(cat /var/lib/cachefs/lock)")
        process.communicate(timeout=60)
        assert process.returncode == 0


def accounts(machine: BareDebian) -> list[str]:
    return [line for name in ("passwd", "group") for line in (machine.root / "etc" / name).read_text().splitlines()]


def test_install_use_upgrade_and_purge_leave_nothing(debian: BareDebian) -> None:
    files, users = debian.files(), accounts(debian)
    digest = hashlib.sha256((debian.root / "srv/photos/1.jpg").read_bytes()).hexdigest()

    debian.run("apt-get", "-qy", "install", "/tmp/0.deb")
    assert "cachefs" in "".join(accounts(debian))
    enabled = debian.root / "etc/systemd/system/multi-user.target.wants/cachefsd.service"
    assert enabled.is_symlink()
    debian.run("cachefsd", "--check-config")
    completion = ". /usr/share/bash-completion/completions/cachectl; complete -p cachectl"
    assert "_cachectl_completion" in debian.run("bash", "-c", completion)
    before = debian.run("cachectl", "--version")

    with daemon(debian):
        debian.run("cachectl", "dataset", "add", "photos", "file:///srv/photos")
        debian.run("mount", "-t", "cachefs", "photos", "/mnt/photos")
        assert digest in debian.run("sha256sum", "/mnt/photos/1.jpg")
        reader = debian.start("sh", "-c", "exec 3</mnt/photos/1.jpg; echo $$; exec sleep infinity")
        assert reader.stdout is not None
        number = reader.stdout.readline().strip()
        refused = debian.run("dpkg", "-i", "/tmp/1.deb", status=1)
        assert "the package cannot be upgraded while /mnt/photos is in use" in refused
        assert debian.run("cachectl", "--version") == before
        assert digest in debian.run("sha256sum", "/mnt/photos/1.jpg")
        debian.run("sh", "-c", f"kill {number}")
        reader.communicate(timeout=60)
    upgraded = debian.run("dpkg", "-i", "/tmp/1.deb")
    assert "/mnt/photos was unmounted for the upgrade; mount it again" in upgraded
    assert NEWER in debian.run("cachectl", "--version")

    with daemon(debian):
        debian.run("mount", "-t", "cachefs", "photos", "/mnt/photos")
        assert digest in debian.run("sha256sum", "/mnt/photos/1.jpg")
        debian.run("cachectl", "umount", "/mnt/photos")
    debian.run("apt-get", "-qy", "purge", "cachefsd")
    assert debian.files() - ACCOUNT_BACKUPS == files - ACCOUNT_BACKUPS
    assert accounts(debian) == users
