"""Where and how people start a training: it computes the same under `cachefs run`, and is read ahead."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.daemon import Daemon
from tests.mounting import mounted
from tests.warm_python import WarmPython

CACHEFS = Path(sys.executable).with_name("cachefs")
FILES = 60
SECONDS = 200.0
SCRIPT = """
import glob, sys
import torch
from torch.utils.data import DataLoader, Dataset

class Files(Dataset):
    def __init__(self, root): self.files = sorted(glob.glob(glob.escape(root) + "/*/*"))
    def __len__(self): return len(self.files)
    def __getitem__(self, index):
        with open(self.files[index]) as file: return int(file.read())

torch.manual_seed(1)
for _ in range(2):
    print([batch.tolist() for batch in DataLoader(Files(sys.argv[1]), 8, shuffle=True, num_workers=2)])
"""


@dataclass(frozen=True)
class Node:
    socket: Path
    home: Path
    mount: Path
    script: Path
    # What the script prints of the origin.
    alone: str

    def command(self, name: str, *command: str | Path) -> list[str]:
        return [*map(str, [CACHEFS, "run", "--job", name, "--socket", self.socket, "--", *command])]

    def check(self, done: "subprocess.CompletedProcess[str]") -> None:
        assert (done.returncode, done.stdout) == (0, self.alone), done.stderr
        ours = [line for line in done.stderr.splitlines() if line.startswith("cachefs: ")]
        assert len([line for line in ours if f": {FILES} samples an epoch, read ahead" in line]) == 1, done.stderr
        assert len([line for line in ours if "2 epochs, " in line]) == 1, done.stderr


@pytest.fixture(scope="module")
def node(torch_jobs: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    home = tmp_path_factory.mktemp("environments")
    top = home / "origin"
    for number in range(FILES):
        path = top / f"c{number % 5}" / f"{number:03}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(number))
    script = home / "training.py"
    script.write_text(SCRIPT)
    alone = torch_jobs.run([sys.executable, script, top], timeout=SECONDS)
    with Daemon(home / "n") as daemon:
        daemon.add_dataset("files", f"file://{top}")
        with mounted(daemon.socket, "files", home / "mnt") as mount:
            yield Node(daemon.socket, home, mount, script, alone.stdout)


def test_a_module_and_a_link(torch_jobs: WarmPython, node: Node, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.symlink_to(node.mount)
    as_module = "import runpy; runpy.run_module('training', run_name='__main__', alter_sys=True)"  # as `-m training`
    command = node.command("link", sys.executable, "-c", as_module, root)
    variables = {**os.environ, "PYTHONPATH": str(node.script.parent)}
    node.check(torch_jobs.run(command, timeout=SECONDS, env=variables))


def test_a_bind_mount(torch_jobs: WarmPython, node: Node, tmp_path: Path) -> None:
    bound = tmp_path / "bound"
    bound.mkdir()
    subprocess.run(["mount", "--bind", node.mount, bound], check=True)
    try:
        node.check(torch_jobs.run(node.command("bound", sys.executable, node.script, bound), timeout=SECONDS))
    finally:
        subprocess.run(["umount", bound], check=True)


def test_a_relative_path_with_dots_to_a_farm_of_links(torch_jobs: WarmPython, node: Node, tmp_path: Path) -> None:
    farm = tmp_path / "farm"
    farm.mkdir()
    for directory in node.mount.iterdir():
        (farm / directory.name).symlink_to(f"{node.mount}/../{node.mount.name}/c1/../{directory.name}")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = node.command("relative", sys.executable, node.script, f"../{farm.name}/.")
    job = torch_jobs.start(command, cwd=farm, **pipes)
    stdout, stderr = job.communicate(timeout=SECONDS)
    node.check(subprocess.CompletedProcess(job.args, job.returncode, stdout, stderr))


@pytest.mark.parametrize("program", ['- "$ROOT" < "$SCRIPT"', '-m training "$ROOT"'])
def test_a_bare_environment(node: Node, tmp_path: Path, program: str) -> None:
    """Few descriptors; neither home nor temporary directory; processes have other numbers in there, and there is no
    network; Python's options, and warnings are errors."""
    line = (
        "ulimit -n 48; "
        "exec unshare --pid --fork --mount-proc --net --propagation private env -u HOME TMPDIR=/nonexistent LC_ALL=C "
        'PYTHONUTF8=0 "$PYTHON" -bb -OO -W error -u ' + program
    )
    variables = {"PYTHON": sys.executable, "SCRIPT": str(node.script), "ROOT": str(node.mount)}
    variables["PYTHONPATH"] = str(node.script.parent)
    done = subprocess.run(
        node.command("started", "sh", "-c", line), capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path,
        env={**os.environ, **variables},
    )  # fmt: skip
    node.check(done)
