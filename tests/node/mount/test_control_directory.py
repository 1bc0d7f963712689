"""The control file of a mount: publishing from a shell, or any language, by writing lines of JSON."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cachefs.errors import NotFound
from cachefs.job_messages import JobName, JobView
from cachefs.mount_table import mount_points
from cachefs.rpc import JOB_SHOW
from tests.as_user import NOBODY, as_user, public_directory
from tests.daemon import Daemon
from tests.mounting import mount_pid, mounted, read_tree

FILES = 6
SEQUENTIAL = {"kind": "sequential", "size": FILES}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    top = tmp_path_factory.mktemp("origin")
    for number in range(FILES):
        (top / f"{number}.bin").write_bytes(bytes([number]) * 100)
    own = tmp_path_factory.mktemp("own")
    (own / ".cachefs").write_text("the dataset's")
    with Daemon(tmp_path_factory.mktemp("node")) as running:
        running.add_dataset("numbers", f"file://{top}")
        running.add_dataset("own", f"file://{own}")
        yield running


@pytest.fixture(scope="module", params=["zero_open", "no_zero_open"])
def mount(daemon: Daemon, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mounted(daemon.socket, "numbers", tmp_path_factory.mktemp("mnt") / "numbers", request.param) as directory:
        yield directory


def job(daemon: Daemon, name: str, seen: Callable[[JobView], bool] = lambda _: True) -> JobView:
    """The job, once the daemon shows it so."""
    deadline = time.monotonic() + 60
    view: JobView | None = None
    while time.monotonic() < deadline:
        try:
            view = daemon.client.call(JOB_SHOW, JobName(job=name))
            if seen(view):
                return view
        except NotFound:
            pass
        time.sleep(0.05)
    raise AssertionError(f"job {name} stays {view}")


def say(mount: Path, *messages: dict[str, Any]) -> None:
    (mount / ".cachefs" / "publish").write_text("".join(json.dumps(message) + "\n" for message in messages))


def test_a_shell_publishes(daemon: Daemon, mount: Path) -> None:
    name = f"shell-{mount.parent.name}"
    line = json.dumps({"op": "publish", "job": name, "sampler": SEQUENTIAL, "workers": 3})
    subprocess.run(["sh", "-c", f"echo '{line}' > {mount}/.cachefs/publish"], check=True, timeout=20)
    view = job(daemon, name)
    assert (view.source, view.dataset, view.state) == ("control file", "numbers", "running")
    assert [consumer.consumer for consumer in view.consumers] == ["0"]


def test_orders_progress_and_the_end_follow(daemon: Daemon, mount: Path) -> None:
    name = f"steps-{mount.parent.name}"
    order = [5, 4, 3, 2, 1, 0] * 50_000  # many times what a pipe holds
    files = [f"{number}.bin" for number in range(FILES)]
    say(
        mount,
        {"op": "publish", "job": name, "consumer": "7", "files": files},
        {"op": "epoch", "job": name, "consumer": "7", "epoch": 2, "order": order},
        {"op": "progress", "job": name, "consumer": "7", "epoch": 2, "position": 4},
    )
    view = job(daemon, name, lambda view: view.consumers[0].epoch_length == len(order))
    assert view.consumers[0].known_epochs == [2]
    assert view.consumers[0].epoch == 2
    say(mount, {"op": "progress", "job": name, "consumer": "7", "ended": True})
    assert job(daemon, name, lambda view: view.state != "running").state == "ended"


def test_what_makes_no_sense_is_logged_and_the_rest_obeyed(daemon: Daemon, mount: Path) -> None:
    name = f"sense-{mount.parent.name}"
    publish = mount / ".cachefs" / "publish"
    good = json.dumps({"op": "publish", "job": name, "sampler": SEQUENTIAL})
    deep = b"[" * 100_000
    publish.write_bytes(
        b'nonsense\n{"op": "publish", "job": 3}\n{"op": "publish", "job": "x", "dataset": "no"}\n'
        b'{"op": "publish", "job": "\xff"}\n{"x": ' + deep + b"\n" + good.encode()
    )
    job(daemon, name)
    log = Path(f"{mount}.log").read_text()
    assert "nonsense" in log
    assert "Expected `str`, got `int`" in log
    assert "this mount has no dataset 'no'" in log
    [wrong] = [
        line for line in log.splitlines() if line.endswith(r"""the line was b'{"op": "publish", "job": "\xff"}'""")
    ]
    assert "utf-8" in wrong.lower(), "in the words of the library that decodes it"
    assert "maximum recursion depth" in log
    assert "is replaced" not in log


def test_a_number_that_is_too_large_is_logged(daemon: Daemon, mount: Path) -> None:
    name = f"large-{mount.parent.name}"
    say(
        mount,
        {"op": "progress", "job": name, "epoch": 1 << 70},
        {"op": "epoch", "job": name, "epoch": 0, "order": [1 << 40]},
        {"op": "publish", "job": name, "sampler": SEQUENTIAL, "pid": 1 << 70},
        {"op": "publish", "job": name, "sampler": SEQUENTIAL},
    )
    job(daemon, name)
    log = Path(f"{mount}.log").read_text()
    assert "more than 64 bits" in log
    assert "is replaced" not in log
    assert "reads the control file ended" not in log


def test_who_writes_does_not_wait_for_the_daemon(daemon: Daemon, mount: Path) -> None:
    assert daemon.process is not None
    name, beats = f"beats-{mount.parent.name}", 2000
    say(mount, {"op": "publish", "job": name, "sampler": {"kind": "sequential", "size": FILES}})
    job(daemon, name)
    daemon.process.send_signal(signal.SIGSTOP)
    try:  # 2000 heartbeats are more than a pipe holds
        say(mount, *({"op": "progress", "job": name, "epoch": 0, "position": beat % FILES} for beat in range(beats)))
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    view = job(daemon, name, lambda view: view.consumers[0].position == (beats - 1) % FILES)
    assert view.state == "running"


def test_many_writers_at_once_are_all_heard(daemon: Daemon, mount: Path) -> None:
    names = [f"writer-{number}-{mount.parent.name}" for number in range(8)]
    script = 'echo "$1" > "$2/.cachefs/publish"'
    writers = [
        subprocess.Popen(
            ["sh", "-c", script, "sh", json.dumps({"op": "publish", "job": name, "sampler": SEQUENTIAL}), str(mount)]
        )
        for name in names
    ]
    assert [writer.wait(60) for writer in writers] == [0] * len(names)
    for name in names:
        job(daemon, name)


def test_the_control_directory_is_there_but_not_listed(mount: Path) -> None:
    assert sorted(read_tree(mount)) == [f"{number}.bin".encode() for number in range(FILES)]
    assert os.listdir(mount / ".cachefs") == ["publish"]
    assert stat.S_ISFIFO((mount / ".cachefs" / "publish").stat().st_mode)
    assert os.access(mount / ".cachefs", os.X_OK)
    assert os.access(mount / ".cachefs" / "publish", os.W_OK)
    with pytest.raises(FileNotFoundError):
        (mount / ".cachefs" / "other").stat()


def test_a_datasets_own_name_comes_first(daemon: Daemon, tmp_path: Path) -> None:
    with mounted(daemon.socket, "own", tmp_path / "own") as directory:
        assert (directory / ".cachefs").read_text() == "the dataset's"


@pytest.fixture(scope="module")
def several(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mounted(daemon.socket, "numbers,own", tmp_path_factory.mktemp("mnt") / "several") as directory:
        yield directory


def test_a_mount_of_several_needs_the_dataset_named(daemon: Daemon, several: Path) -> None:
    say(
        several,
        {"op": "publish", "job": "unnamed", "sampler": SEQUENTIAL},
        {"op": "publish", "job": "named", "dataset": "numbers", "sampler": SEQUENTIAL},
    )
    assert job(daemon, "named").dataset == "numbers"
    assert "name one of numbers, own" in Path(f"{several}.log").read_text()
    with pytest.raises(NotFound):
        daemon.client.call(JOB_SHOW, JobName(job="unnamed"))


def test_what_makes_no_sense_does_not_fill_the_log(daemon: Daemon, tmp_path: Path) -> None:
    with mounted(daemon.socket, "numbers", tmp_path / "flood") as directory:
        long = {"op": "publish", "job": "x" * 1_000_000, "sampler": SEQUENTIAL}
        say(directory, long, *[{"op": "nonsense"}] * 2000, {"op": "publish", "job": "after", "sampler": SEQUENTIAL})
        job(daemon, "after")
    log = Path(f"{directory}.log").read_text()
    assert 0 < log.count("the line was") < 60
    assert len(log) < 60_000


# Workers, control process and supervisor in a hurry.
HURRY = """
from cachefs.mount import zero_open
load = zero_open.load_interposer
def load_and_hurry():
    library = load()
    from cachefs.mount.processes import control_process, supervisor, worker_pool
    supervisor.TICK_SECONDS = control_process.HEARTBEAT_SECONDS = 0.1
    worker_pool.SILENT_SECONDS = 600
    return library
zero_open.load_interposer = load_and_hurry
"""


def test_a_control_process_that_is_stopped_is_replaced(daemon: Daemon, tmp_path: Path) -> None:
    beats = json.dumps({"op": "progress", "job": "replaced", "position": 1}).encode() + b"\n"
    with mounted(daemon.socket, "numbers", tmp_path / "stopped", "no_push", patch=HURRY) as directory:
        publish = directory / ".cachefs" / "publish"
        with publish.open("wb", buffering=0) as writer:
            writer.write(json.dumps({"op": "publish", "job": "replaced", "sampler": SEQUENTIAL}).encode() + b"\n")
            job(daemon, "replaced")
            children = psutil.Process(mount_pid(daemon.client, directory)).children()
            (control,) = (child for child in children if Path(f"/proc/{child.pid}/comm").read_text() == "control\n")
            control.suspend()
            assert writer.write(beats * 2000) < len(beats) * 2000  # more than a pipe holds
        publish.write_bytes(beats)
        assert not control.is_running()
        job(daemon, "replaced", lambda view: view.consumers[0].position == 1)


def test_a_mount_that_was_published_through_can_be_unmounted(daemon: Daemon, tmp_path: Path) -> None:
    with mounted(daemon.socket, "numbers", tmp_path / "busy") as directory:
        say(directory, {"op": "publish", "job": "busy", "sampler": SEQUENTIAL})
        job(daemon, "busy")
        deadline = time.monotonic() + 60
        while mount_points() and any(point.path == directory for point in mount_points()):
            done = subprocess.run(["umount", "-i", str(directory)], capture_output=True, text=True, timeout=10)
            assert time.monotonic() < deadline, done.stderr
            time.sleep(0.2)


def test_a_job_reads_several_datasets_of_one_mount(daemon: Daemon, several: Path) -> None:
    for dataset, files, order in (("numbers", ["4.bin", "2.bin"], [1, 0]), ("own", [".cachefs"], [0])):
        of_consumer = {"job": "both", "consumer": dataset}
        say(
            several,
            {"op": "publish", "dataset": dataset, "files": files, **of_consumer},
            {"op": "epoch", "epoch": 0, "order": order, **of_consumer},
        )
    view = job(daemon, "both", lambda view: [one.epoch_length > 0 for one in view.consumers] == [True, True])
    assert {one.consumer: one.epoch_length for one in view.consumers} == {"numbers": 2, "own": 1}


@pytest.mark.parametrize("options", ["shield=off", "shield=auto"])
def test_answers_belong_to_the_user_who_has_looked_them_up(daemon: Daemon, options: str) -> None:
    """So the mount knows who calls: as long as a caller has the FIFO open, no other user becomes its owner."""
    with public_directory() as top, mounted(daemon.socket, "numbers", top / "m", options) as mount:
        fifo = f"{mount}/.cachefs/answers-0123456ab"
        script = (
            f"import os; fd = os.open({fifo!r}, os.O_RDWR | os.O_NONBLOCK); print(os.fstat(fd).st_uid, flush=True); "
            "input()"
        )
        command = [*as_user(NOBODY), sys.executable, "-c", script]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as caller:
            assert caller.stdin is not None
            assert caller.stdout is not None
            assert caller.stdout.readline() == f"{NOBODY}\n"
            fd = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
            assert os.fstat(fd).st_uid == os.stat(fifo).st_uid == NOBODY
            os.close(fd)
            caller.communicate("\n")
        assert os.stat(f"{mount}/.cachefs/answers-0123456ac").st_uid == os.geteuid()
