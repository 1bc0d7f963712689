"""`cachefs run`: an unchanged PyTorch script publishes what it then reads, and computes what it would have computed."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch

from cachefs.errors import CachefsError
from cachefs.job_messages import JobEpoch, JobName, JobProgress, JobPublication, JobView
from cachefs.planning.sequences.sampler import epoch_order
from cachefs.rpc import JOB_SHOW
from cachefs.snapshot import Snapshot
from tests.daemon import Daemon
from tests.helper_process import helper_process
from tests.mounting import mounted
from tests.node.publishing.said import complaints
from tests.recording import Recording, recording
from tests.waiting import until
from tests.warm_python import WarmPython

SCRIPT = Path(__file__).with_name("training_script.py")
CACHEFS = Path(sys.executable).with_name("cachefs")
FILES = 60
EPOCHS = 3
SECONDS = 250.0

GIVEN = [
    "distributed-never-told", "sequential", "shuffle", "shuffle-here", "shuffle-generator", "shuffle-persistent",
    "replacement", "weighted", "subset-random", "unbatched", "custom", "custom-persistent", "custom-here",
    "concatenated", "batches-of-batches",
]  # fmt: skip
SPECIFIED = ["distributed", "distributed-persistent"]
LEARNED = ["learned", "learned-here", "learned-subset", "learned-pairs", "learned-spawned"]
# Their samplers give batch by batch what nobody can know before.
DRAWN = ["custom-batches", "custom-batches-here"]
# Each is a loader of its own, numbered as it comes.
TOGETHER = [*SPECIFIED, *GIVEN, *LEARNED, *DRAWN]


@dataclass(frozen=True)
class Node:
    daemon: Daemon
    record: Recording
    socket: Path
    mount: Path
    snapshot: Snapshot
    torch_jobs: WarmPython
    printed: dict[tuple[str, ...], str]  # by scenarios: what the script prints without cachefs

    def watched(
        self, job: str, *arguments: str | Path, environment: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run the script with these arguments as a job."""
        line = command(*script(self.mount, *arguments), job=job, socket=self.socket)
        return self.torch_jobs.run(line, timeout=SECONDS, env={**os.environ, **(environment or {})})

    def started(self, job: str, *arguments: str | Path) -> "subprocess.Popen[str]":
        line = command(*script(self.mount, *arguments), job=job, socket=self.socket)
        return self.torch_jobs.start(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def alone(self, *scenarios: str) -> str:
        """What the script prints without cachefs."""
        if scenarios not in self.printed:
            line = script(self.mount, *scenarios)
            done = self.torch_jobs.run(line, timeout=SECONDS, env={**os.environ, "PAUSE": "0", "SPAWN": "fork"})
            assert done.returncode == 0, done.stderr
            self.printed[scenarios] = done.stdout
        return self.printed[scenarios]

    def numbers(self, publish: JobPublication) -> list[int]:
        """What the files of a published map say they are."""
        assert publish.map is not None
        entries = numpy.frombuffer(publish.map.entries, "<u4")
        return [int(Path(os.fsdecode(self.snapshot.path(int(entry)))).stem) for entry in entries]

    def show(self, job: str) -> JobView:
        return self.daemon.client.call(JOB_SHOW, JobName(job=job))


@pytest.fixture(scope="module")
def node(torch_jobs: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    top = tmp_path_factory.mktemp("origin")
    for number in range(FILES):
        path = top / f"class{number % 7}" / f"{number:03}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(number))
    home = tmp_path_factory.mktemp("node")
    with Daemon(home) as daemon:
        view = daemon.add_dataset("numbers", f"file://{top}")
        snapshot = Snapshot(Path(view.path))
        with (
            mounted(daemon.socket, "numbers", tmp_path_factory.mktemp("mnt") / "numbers") as mount,
            recording(daemon.client, home / "recorded") as record,
        ):
            yield Node(daemon, record, home / "recorded", mount, snapshot, torch_jobs, {})
        snapshot.close()


def command(*arguments: str | Path, job: str, socket: Path) -> list[str]:
    return [str(CACHEFS), "run", "--job", job, "--socket", str(socket), "--", *map(str, arguments)]


def script(*arguments: str | Path) -> list[str]:
    return [sys.executable, str(SCRIPT), *map(str, arguments)]


def finished(line: list[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONWARNINGS": "ignore", **(environment or {})}
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)


# --- what is published ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Epochs:
    """A run of all scenarios. read: scenario -> what each epoch read; alone: the whole output without cachefs."""

    watched: str
    alone: str
    stderr: str
    read: dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def epochs(node: Node) -> Epochs:
    watched = node.watched("all", *TOGETHER, environment={"TOLD": str(node.record.notes)})
    assert watched.returncode == 0, watched.stderr
    read: dict[str, list[list[int]]] = {}
    for line in watched.stdout.splitlines()[:-1]:
        said = json.loads(line)
        read.setdefault(said["scenario"], []).append(said["read"])
    return Epochs(watched.stdout, node.alone(*TOGETHER), watched.stderr, read)


def consumer_is(scenario: str) -> Callable[[JobPublication | JobEpoch | JobProgress], bool]:
    number = TOGETHER.index(scenario)
    name = "1" if scenario in (*SPECIFIED, "distributed-never-told") else "pid-"
    return lambda message: (
        message.consumer.startswith(name)
        and (message.consumer.endswith(f".{number}") if number else "." not in message.consumer)
    )


def test_a_watched_script_computes_the_same(epochs: Epochs) -> None:
    assert epochs.watched == epochs.alone
    assert complaints(epochs.stderr) == []


@pytest.mark.parametrize("scenario", SPECIFIED)
def test_all_epochs_of_a_distributed_sampler_follow_from_a_spec(node: Node, epochs: Epochs, scenario: str) -> None:
    (publish,) = filter(consumer_is(scenario), node.record.of(JobPublication, "all"))
    assert publish.spec is not None
    assert (publish.rank, publish.world_size, publish.workers, publish.batch_size) == (1, 2, 2, 8)
    numbers = node.numbers(publish)
    for epoch, read in enumerate(epochs.read[scenario]):
        assert [numbers[sample] for sample in epoch_order(publish.spec, epoch)] == read
    assert not list(filter(consumer_is(scenario), node.record.of(JobEpoch, "all")))


@pytest.mark.parametrize("scenario", GIVEN)
def test_each_epoch_is_published_as_it_is_read(node: Node, epochs: Epochs, scenario: str) -> None:
    published = list(filter(consumer_is(scenario), node.record.of(JobPublication, "all")))
    lengths = [(one.consumer, len(node.numbers(one))) for one in published]
    assert len({*lengths}) == 1, lengths
    publish = published[-1]
    assert publish.spec is None
    numbers = node.numbers(publish)
    orders = {}
    for message in filter(consumer_is(scenario), node.record.of(JobEpoch, "all")):
        orders[message.epoch] = [numbers[sample] for sample in numpy.frombuffer(message.order, "<u4")]
    # That it is never told its epochs shows when the second begins.
    first = 1 if scenario == "distributed-never-told" else 0
    assert [orders[epoch] for epoch in range(first, EPOCHS)] == epochs.read[scenario][first:]


@pytest.mark.parametrize("scenario", ["shuffle-generator", "shuffle-persistent", "shuffle", "distributed-never-told"])
def test_the_epoch_after_is_published_where_it_follows(node: Node, epochs: Epochs, scenario: str) -> None:
    said: list[tuple[str, int]] = []
    for message in node.record.requests:
        if isinstance(message, (JobEpoch, JobProgress)) and message.job == "all" and consumer_is(scenario)(message):
            said.append((type(message).__name__, message.epoch))
    before = said[: said.index(("JobProgress", 2))]
    assert ("JobEpoch", 2) in before


@pytest.mark.parametrize("scenario", LEARNED)
def test_samples_nobody_lists_are_known_from_the_second_epoch(node: Node, epochs: Epochs, scenario: str) -> None:
    publishes = list(filter(consumer_is(scenario), node.record.of(JobPublication, "all")))
    numbers = node.numbers(publishes[-1])
    orders = {message.epoch: message for message in filter(consumer_is(scenario), node.record.of(JobEpoch, "all"))}
    last = epochs.read[scenario][-1]
    if scenario == "learned-pairs":
        last = [number for pair in last for number in divmod(pair, 1000)]
    assert [numbers[file] for file in numpy.frombuffer(orders[EPOCHS - 1].order, "<u4")] == last


@pytest.mark.parametrize("scenario", DRAWN)
def test_what_only_the_sampler_knows_is_published_as_it_is_drawn(node: Node, epochs: Epochs, scenario: str) -> None:
    publish = list(filter(consumer_is(scenario), node.record.of(JobPublication, "all")))[-1]
    numbers = node.numbers(publish)
    read = [number for epoch in epochs.read[scenario] for number in epoch]
    parts = {message.epoch: message.order for message in filter(consumer_is(scenario), node.record.of(JobEpoch, "all"))}
    after = 0
    for _, order in sorted(parts.items()):
        part = [numbers[sample] for sample in numpy.frombuffer(order, "<u4")]
        after = next(start for start in range(after, len(read)) if read[start : start + len(part)] == part) + len(part)
    assert after


@pytest.mark.parametrize("scenario", ["distributed", "shuffle-here", "custom", "learned-pairs"])
def test_progress_follows_the_reading(node: Node, epochs: Epochs, scenario: str) -> None:
    told = list(filter(consumer_is(scenario), node.record.of(JobProgress, "all")))
    places = [(message.epoch, message.position) for message in told if not message.ended]
    assert places == sorted(places)
    assert places[-1][0] == EPOCHS - 1
    files_per_sample = 2 if scenario == "learned-pairs" else 1
    last = len(epochs.read[scenario][-1]) * files_per_sample
    # The last batch is delivered after the last time the sampler was asked.
    assert last - 8 * files_per_sample <= places[-1][1] <= last


def test_the_job_ends_with_its_process(node: Node, epochs: Epochs) -> None:
    view = until(lambda: node.show("all"), is_right=lambda view: view.state != "running")
    assert view.state == "ended"
    assert view.source == "cachefs run"


# --- what cannot be predicted -----------------------------------------------------------------------------------


def test_a_stream_that_lists_its_shards_is_left_to_the_daemon(node: Node) -> None:
    done = node.watched("iterable", "iterable")
    assert done.returncode == 0
    assert done.stdout == node.alone("iterable")
    assert complaints(done.stderr) == []
    assert not node.record.of(JobPublication, "iterable")


def helper_of(process: subprocess.Popen[str], node: Node, job: str) -> int:
    """The process number of the helper, once it has published."""
    publishes = until(lambda: node.record.of(JobPublication, job))
    assert publishes[0].pid == process.pid
    helper = helper_process(process.pid)
    assert helper is not None
    return helper.pid


# --- when publishing fails --------------------------------------------------------------------------------------


def test_without_the_socket_the_job_is_published_through_the_mount_and_told_what_is_lost(
    node: Node, tmp_path: Path
) -> None:
    line = [str(CACHEFS), "run", "--job", "alone", "--", *script(node.mount, "shuffle", "learned")]
    environment = {**os.environ, "CACHEFS_SOCKET": str(tmp_path / "nobody")}
    done = node.torch_jobs.run(line, timeout=SECONDS, env=environment)
    assert done.returncode == 0
    assert done.stdout == node.alone("shuffle", "learned")
    (complaint,) = complaints(done.stderr)
    assert complaint == (
        f"cachefs: there is no socket {tmp_path / 'nobody'} here, so files that C libraries open are not observed; "
        "everything else is published through the mount"
    )
    assert node.show("alone~control").state == "ended"


def test_a_job_that_reads_elsewhere_starts_nothing(node: Node, tmp_path: Path) -> None:
    shutil.copytree(node.mount, tmp_path / "copy")
    line = command(*script(tmp_path / "copy", "shuffle", "distributed"), job="elsewhere", socket=node.socket)
    done = node.torch_jobs.run(line, timeout=SECONDS)
    assert done.returncode == 0
    assert not complaints(done.stderr)
    assert not node.record.of(JobPublication, "elsewhere")


def test_a_killed_helper_costs_only_the_publishing(node: Node) -> None:
    process = node.started("killed", "shuffle", "learned")
    helper = helper_of(process, node, "killed")
    os.kill(helper, signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert stdout == node.alone("shuffle", "learned")
    assert len(complaints(stderr)) == 1


def test_a_stuck_helper_does_not_hold_the_job_up(node: Node) -> None:
    process = node.started("stuck", "shuffle", "learned")
    helper = helper_of(process, node, "stuck")
    os.kill(helper, signal.SIGSTOP)
    try:
        stdout, _ = process.communicate(timeout=SECONDS)  # until nobody has its stderr open, either
    finally:
        os.kill(helper, signal.SIGKILL)
    assert process.returncode == 0
    assert stdout == node.alone("shuffle", "learned")


def test_a_restarted_daemon_is_told_again(node: Node, tmp_path: Path) -> None:
    with Daemon(tmp_path / "node") as daemon:
        top = tmp_path / "origin"
        shutil.copytree(node.mount, top)
        daemon.add_dataset("numbers", f"file://{top}")
        with mounted(daemon.socket, "numbers", tmp_path / "mnt") as mount:
            line = command(*script(mount, *["shuffle"] * 6), job="again", socket=daemon.socket)
            process = node.torch_jobs.start(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                wait_for_job(daemon, "again")
                daemon.kill9()
                daemon.start()
                wait_for_job(daemon, "again")
            finally:
                process.kill()
                process.wait()


def wait_for_job(daemon: Daemon, job: str) -> None:
    def is_published() -> bool:
        with contextlib.suppress(CachefsError):
            consumers = daemon.client.call(JOB_SHOW, JobName(job=job)).consumers
            return any(consumer.known_epochs for consumer in consumers)
        return False

    until(is_published, f"job {job} is published")


# --- the command ------------------------------------------------------------------------------------------------


def test_run_becomes_the_command(tmp_path: Path) -> None:
    line = command(sys.executable, "-c", "import os, sys; print(os.getpid()); sys.exit(7)", job="j", socket=tmp_path)
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    stdout, _ = process.communicate(timeout=60)
    assert (int(stdout), process.returncode) == (process.pid, 7)


def test_run_of_what_is_not_there(tmp_path: Path) -> None:
    done = finished(command("no-such-command", job="j", socket=tmp_path))
    assert done.returncode == 127
    assert done.stderr == "cachefs: no-such-command: no such command\n"
    (tmp_path / "text").write_text("")
    assert finished(command(tmp_path / "text", job="j", socket=tmp_path)).returncode == 126


def test_the_environment_is_the_jobs_own(tmp_path: Path) -> None:
    """Nothing that cachefs sets for processes of its own gets into the job, in whichever way it is started."""
    code = "import json, os, torch.utils.data; print(json.dumps(dict(os.environ)))"
    given = {"PYTHONPATH": "", "_": "", "SHLVL": "1"}
    plain = json.loads(
        finished([sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"], given).stdout
    )
    line = command(*command(sys.executable, "-c", code, job="j", socket=tmp_path), job="outer", socket=tmp_path)
    watched = json.loads(finished(line, given).stdout)
    assert watched.pop("PYTHONPATH").endswith("cachefs/hooks/startup")
    # Tests may run under another name of the same interpreter than `cachefs` does.
    assert Path(watched.pop("CACHEFS_PYTHON")).samefile(sys.executable)
    # Where the processes of the run leave what the summary is made of, and which of them prints it.
    assert Path(watched.pop("CACHEFS_RUN")).name.startswith("run-")
    assert watched.pop("CACHEFS_TOP").isdecimal()
    changed = {"CACHEFS_JOB": "j", "CACHEFS_SOCKET": str(tmp_path)}
    assert {**watched, "PYTHONPATH": ""} == plain | changed


def test_another_sitecustomize_is_run_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.theirs = __file__")
    code = "import sys, sitecustomize; print(sys.theirs, sitecustomize.__file__)"
    done = finished(
        command(sys.executable, "-c", code, job="j", socket=tmp_path), environment={"PYTHONPATH": str(tmp_path)}
    )
    theirs = str(tmp_path / "sitecustomize.py")
    assert done.stdout.split() == [theirs, theirs]


def test_a_python_without_torch_loads_nothing_of_cachefs(tmp_path: Path) -> None:
    code = "import sys; print([name for name in sys.modules if 'cachefs' in name])"
    done = finished(command(sys.executable, "-S", "-c", code, job="j", socket=tmp_path))
    assert done.stdout == "[]\n"


def test_an_interpreter_without_cachefs_publishes_too(node: Node, tmp_path: Path) -> None:
    venv.create(tmp_path / "environment", with_pip=False)
    python = tmp_path / "environment" / "bin" / "python"
    (packages,) = (tmp_path / "environment" / "lib").glob("python*/site-packages")
    for path in Path(torch.__file__).parents[1].iterdir():
        if "cachefs" not in path.name and path.suffix != ".pth" and not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)
    assert finished([str(python), "-P", "-c", "import cachefs"]).returncode == 1
    line = command(python, SCRIPT, node.mount, "shuffle", job="foreign", socket=node.socket)
    done = finished(line, {"TOLD": str(node.record.notes)})
    assert done.returncode == 0, done.stderr
    assert not complaints(done.stderr)
    assert {message.epoch for message in node.record.of(JobEpoch, "foreign")} >= set(range(EPOCHS))
