"""The commands of docs/tutorial.md, as they stand there, lead from a bare Debian to a training run."""

import os
import re
import shutil
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


@pytest.fixture
def debian(tmp_path: Path) -> Iterator[BareDebian]:
    with bare_debian(tmp_path) as machine:
        shutil.copytree(REPOSITORY, machine.root / "root/cachefs", ignore=NOT_SOURCE)
        yield machine


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


def test_every_command_of_the_tutorial(debian: BareDebian) -> None:
    blocks = COMMANDS.findall((REPOSITORY / "docs/tutorial.md").read_text())
    look = "cp ~/tutorial/train.log ~/tutorial/before.txt ~/tutorial/after.txt /root\n"
    script = "\n".join(["set -ex", where_pip_looks(debian), "cd", *blocks[:-1], look, blocks[-1]])
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
