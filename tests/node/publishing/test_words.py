"""What `cachefs run` says: one line at the start, one for each loader, and a summary in the end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cachefs_tools import cachectl
from tests.daemon import Daemon
from tests.mounting import mounted
from tests.node.publishing.said import UNANSWERED
from tests.node.publishing.train_and_validate import TRAIN, VALIDATION, name
from tests.waiting import until
from tests.warm_python import WarmPython

SCRIPT = Path(__file__).with_name("train_and_validate.py")
CACHEFS = Path(sys.executable).with_name("cachefs")
SECONDS = 240.0
LINES = SCRIPT.read_text().splitlines()
BYTES = 1000
# All bytes of an epoch.
EPOCH = sum(BYTES + number for number in range(TRAIN + VALIDATION))


def line_of(comment: str) -> str:
    """The place that a line of the script with this comment is called."""
    [number] = [number for number, line in enumerate(LINES, 1) if line.endswith(f"# {comment}")]
    return f"{SCRIPT.name}:{number}"


TRAINING, VALIDATING = line_of("the training loader"), line_of("the validation loader")


@dataclass(frozen=True)
class Node:
    daemon: Daemon
    root: Path
    torch_jobs: WarmPython

    def command(self, *words: str, run: tuple[str, ...] = (), job: str = "job", script: Path = SCRIPT) -> list[str]:
        line = [CACHEFS, "run", *run, "--job", job, "--socket", self.daemon.socket, "--", sys.executable, script]
        return [str(word) for word in (*line, self.root, *words)]

    def run(
        self, *words: str, run: tuple[str, ...] = (), job: str = "job", script: Path = SCRIPT, **more: str
    ) -> "Ran":
        command, environment = self.command(*words, run=run, job=job, script=script), {**os.environ, **more}
        done = self.torch_jobs.run(command, timeout=SECONDS, env=environment)
        return Ran(done.returncode, done.stdout, done.stderr)

    def show(self, job: str) -> dict[str, Any]:
        """What `job show` says of a job that has ended: its helper tells the daemon a moment after that."""
        return until(lambda: self._shown(job), is_right=lambda view: view["state"] != "running")

    def _shown(self, job: str) -> dict[str, Any]:
        shown = CliRunner().invoke(cachectl.main, ["--socket", str(self.daemon.socket), "job", "show", "--json", job])
        assert shown.exit_code == 0, shown.output
        found: dict[str, Any] = json.loads(shown.stdout)
        return found


@dataclass(frozen=True)
class Ran:
    status: int
    stdout: str
    stderr: str

    @property
    def said(self) -> list[str]:
        """What cachefs has said, without its name."""
        return [line[9:] for line in self.stderr.splitlines() if line.startswith("cachefs: ")]


@pytest.fixture(scope="module")
def node(torch_jobs: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    top = tmp_path_factory.mktemp("origin")
    for number in range(TRAIN + VALIDATION):
        (top / name(number)).write_bytes(bytes(BYTES + number))
    with Daemon(tmp_path_factory.mktemp("node")) as daemon:
        daemon.add_dataset("numbers", f"file://{top}")
        with mounted(daemon.socket, "numbers", tmp_path_factory.mktemp("mnt") / "numbers") as mount:
            yield Node(daemon, mount, torch_jobs)


def test_a_loop_whose_order_is_known_from_the_first_epoch(node: Node) -> None:
    ran = node.run("listed", "--epochs", "3", "exit", "3", job="known")
    assert (ran.status, ran.stdout) == (3, f"{3 * EPOCH}\n")
    first, *loaders = ran.said[:3]
    assert first.startswith(f"mounted: numbers at {node.root}")
    assert first.endswith(f"; daemon: at {node.daemon.socket}")
    assert sorted(loaders) == [
        f"loader Listed ({TRAINING}): {TRAIN} samples an epoch, read ahead from epoch 1 on",
        f"loader Listed ({VALIDATING}): {VALIDATION} samples an epoch, read ahead from epoch 1 on",
    ]
    summary = ran.said[3:]
    assert summary[0].startswith(f"3 epochs, {3 * (TRAIN + VALIDATION):,} samples in ")
    assert " of the time" in summary[0]
    assert {line.partition(", the loop waited")[0] for line in summary[1:3]} == {
        f"  Listed ({TRAINING}): 3 epochs, {3 * TRAIN} samples",
        f"  Listed ({VALIDATING}): 3 epochs, {3 * VALIDATION} samples",
    }
    assert summary[3].startswith("served by: ") or summary[3].endswith(UNANSWERED)
    assert len(summary) <= 5
    view = node.show("known")
    assert (view["state"], view["reason"]) == ("ended", "")
    for consumer in view["consumers"]:
        loader = consumer["loader"]
        assert (consumer["state"], consumer["problem"], consumer["rank"]) == ("ended", "", 0)
        assert (loader["epochs"], loader["planned"], loader["epoch_samples"]) == (3, 3, loader["epoch_length"])
        assert 0 < loader["waited"] <= loader["busy"]


STREAM = """
import sys
from pathlib import Path
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

class Files(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        for path in sorted(Path(sys.argv[1]).glob("*"))[worker.id :: worker.num_workers]:
            yield len(path.read_bytes())

print(sum(len(batch) for _ in range(3) for batch in DataLoader(Files(), batch_size=10, num_workers=3)))
"""


def test_of_a_stream_the_samples_that_came_are_counted(node: Node, tmp_path: Path) -> None:
    """The last batch of each worker has fewer samples than the others."""
    script = tmp_path / "stream.py"
    script.write_text(STREAM)
    ran = node.run(job="stream", script=script)
    assert ran.stdout == f"{3 * (TRAIN + VALIDATION)}\n"
    assert f"cachefs: 3 epochs, {3 * (TRAIN + VALIDATION):,} samples in " in ran.stderr


def test_a_loop_whose_files_are_learned(node: Node, tmp_path: Path) -> None:
    ran = node.run("hidden", "--epochs", "2", job="learned")
    assert (ran.status, ran.stdout) == (0, f"{2 * EPOCH}\n")
    of_training = [line for line in ran.said if line.startswith(f"loader Hidden ({TRAINING}): ")]
    assert len(of_training) == 1
    assert "read ahead from epoch 2 on" in of_training[0]
    view = node.show("learned")
    assert {consumer["loader"]["name"] for consumer in view["consumers"]} == {
        f"Hidden ({TRAINING})", f"Hidden ({VALIDATING})",
    }  # fmt: skip
    assert [consumer["problem"] for consumer in view["consumers"]] == ["", ""]


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_who_is_interrupted_ends_by_the_signal(node: Node, quiet: tuple[str, ...]) -> None:
    program = "import os, signal, time, torch.utils.data; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"
    line = [CACHEFS, "run", *quiet, "--socket", node.daemon.socket, "--", sys.executable, "-c", program]
    done = node.torch_jobs.run(line, timeout=SECONDS)
    assert done.returncode == -signal.SIGINT
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"


def test_processes_of_one_run_have_one_summary(node: Node) -> None:
    ran = node.run("listed", "--epochs", "2", "ranks", "2", job="ranks")
    assert ran.stdout == f"{2 * EPOCH}\n" * 2
    [summary] = [line for line in ran.said if " of the time" in line]
    assert summary.startswith(f"2 epochs, {4 * (TRAIN + VALIDATION):,} samples in 2 processes in ")
    assert len([line for line in ran.said if line.startswith("loader ")]) == 2
    assert len([line for line in ran.said if line.startswith("mounted: ")]) == 1
    assert {consumer["rank"] for consumer in node.show("ranks")["consumers"]} == {0, 1}


def test_a_quiet_run_says_nothing(node: Node) -> None:
    ran = node.run("hidden", "--epochs", "2", run=("--quiet",), job="quiet")
    assert (ran.status, ran.stdout, ran.said) == (0, f"{2 * EPOCH}\n", [])


def test_a_run_inside_another_speaks_once(node: Node) -> None:
    inner = node.command("listed", "--epochs", "1")
    outer = [str(CACHEFS), "run", "--job", "nested", "--socket", str(node.daemon.socket), "--", *inner]
    done = node.torch_jobs.run(outer, timeout=SECONDS)
    ran = Ran(done.returncode, done.stdout, done.stderr)
    assert (ran.status, ran.stdout) == (0, f"{EPOCH}\n")
    assert len([line for line in ran.said if line.startswith("mounted: ")]) == 1
    assert len([line for line in ran.said if " of the time" in line]) == 1


def test_a_job_whose_stderr_is_closed_ends_as_it_would(node: Node) -> None:
    command = node.command("listed", "--epochs", "1", "exit", "5", job="closed")
    done = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *command], stdout=subprocess.PIPE, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (5, f"{EPOCH}\n".encode())


def test_a_daemon_that_hangs_in_the_end_is_named(node: Node, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    command = node.command("listed", "--epochs", "1", "hold", str(go_on), job="hung")
    pid = node.daemon.process.pid if node.daemon.process is not None else 0
    with node.torch_jobs.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert [job.stdout.readline(), job.stdout.readline()] == [f"{EPOCH}\n", "through\n"]
        os.kill(pid, signal.SIGSTOP)
        try:
            go_on.touch()
            _, stderr = job.communicate(timeout=SECONDS)
        finally:
            os.kill(pid, signal.SIGCONT)
    said = Ran(job.returncode, "", stderr).said
    assert job.returncode == 0
    assert any(line.startswith(f"1 epoch, {TRAIN + VALIDATION} samples in ") for line in said)
    assert any(line.startswith("the sources that served the reads are unknown: ") for line in said)


def test_mounts_of_another_daemon_are_not_named(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        wanted = {}
        for dataset in ("one", "two"):
            (tmp_path / dataset).mkdir()
            (tmp_path / dataset / "file").touch()
            daemon = stack.enter_context(Daemon(tmp_path / f"{dataset}-node"))
            daemon.add_dataset(dataset, f"file://{tmp_path / dataset}")
            directory = tmp_path / f"{dataset}-mount"
            stack.enter_context(mounted(daemon.socket, dataset, directory))
            wanted[daemon.socket] = f"mounted: {dataset} at {directory}; daemon: at {daemon.socket}"
        for socket, line in wanted.items():
            command = [CACHEFS, "run", "--socket", socket, "--", "true"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            assert Ran(done.returncode, done.stdout, done.stderr).said == [line]


def test_a_program_that_is_not_there_is_all_that_is_said(node: Node) -> None:
    done = subprocess.run([CACHEFS, "run", "--", "/no/such"], capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (127, "cachefs: /no/such: no such command\n")


def test_a_program_without_a_loader_has_no_summary(node: Node) -> None:
    with subprocess.Popen(
        [CACHEFS, "run", "--", sys.executable, "-c", "import os; print(os.environ['CACHEFS_RUN'])"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as job:  # fmt: skip
        stdout, stderr = job.communicate(timeout=SECONDS)
    assert job.returncode == 0
    assert len(Ran(0, "", stderr).said) == 1
    directory = Path(stdout.strip())
    assert directory.name.startswith(f"run-{job.pid}-")
    assert not directory.exists()


def test_a_program_whose_loader_reads_no_mount_is_told_so(torch_jobs: WarmPython) -> None:
    program = "from torch.utils.data import DataLoader; print(sum(map(len, DataLoader([1, 2, 3]))))"
    done = torch_jobs.run([CACHEFS, "run", "--", sys.executable, "-c", program], timeout=SECONDS)
    said = Ran(done.returncode, done.stdout, done.stderr).said
    assert (done.returncode, done.stdout) == (0, "3\n")
    assert said[1:] == [
        "no DataLoader was seen to read from a mount, so nothing was read ahead; `cachectl mounts` lists the "
        "directories to read from"
    ]
