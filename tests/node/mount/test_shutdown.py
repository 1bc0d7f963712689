"""A mount that is told to end: programs that use it go on, or get errors, and never find an empty directory."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cachefs.job_messages import JobPublication, SampleMap
from cachefs.mount import kernel
from cachefs.mount_table import find_mount_point, mount_points
from cachefs.rpc import JOB_CANCEL, JOB_PUBLISH
from cachefs_tools.cachectl.status import mount_state
from tests.cachectl import cachectl
from tests.daemon import Daemon
from tests.mounting import mount_again, mount_pid, mounted, run_mount
from tests.waiting import until

FILES = 6
# Watches take 0.2 s in place of 1 s, so that a mount that is to be unmounted must be quiet for 1 s.
QUICK = "from cachefs.mount import mount_use\nmount_use.WATCH_SECONDS = 0.2"
# Opens a file four times a second, for longer than a mount must be quiet.
TURNS = 12
# Opens files, and says of each what came of it.
READER = """
import os, sys, time
top = sys.argv[1]
names = sorted(os.listdir(top))
for name in names:
    open(f"{top}/{name}", "rb").read()
print("warm", flush=True)
for turn in range(int(sys.argv[2])):
    time.sleep(0.25)
    try:
        with open(f"{top}/{names[turn % len(names)]}", "rb") as file:
            print(len(file.read()))
    except OSError as error:
        print(error.strerror)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("origin")
    for number in range(FILES):
        (top / f"{number}.bin").write_bytes(bytes([number]) * 10_000)
    return top


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, tree: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("node")) as running:
        running.add_dataset("tree", f"file://{tree}")
        yield running


def ending_mount(
    daemon: Daemon, directory: Path, *options: str, patch: str = ""
) -> contextlib.AbstractContextManager[Path]:
    """A mount that finds out quickly whether it is used, once it is told to end."""
    return mounted(daemon.socket, "tree", directory, *options, patch=f"{QUICK}\n{patch}")


@contextlib.contextmanager
def held_open(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # close(2) tells that the mount is dead, and closes the file
            os.close(fd)


def is_mounted(directory: Path) -> bool:
    return any(point.path == directory for point in mount_points())


# As for a mount of an ordinary user, whom the kernel tells no opens: lookups tell of a reader.
NOT_TOLD = """
def refuse(*_):
    raise PermissionError(1, "Operation not permitted")
mount_use.watch_opens = refuse
"""


def test_a_reader_between_two_opens_goes_on_to_its_end(daemon: Daemon, tmp_path: Path) -> None:
    """A mount is told to end while a program reads it: the program ends first."""
    with contextlib.ExitStack() as stack:
        mounts = [
            stack.enter_context(ending_mount(daemon, tmp_path / name, option, "grace=600", patch=patch))
            for name, option, patch in (
                ("on", "shield=on", ""), ("off", "shield=off", ""), ("not_told", "shield=off", NOT_TOLD)
            )
        ]  # fmt: skip
        supervisors = [psutil.Process(mount_pid(daemon.client, directory)) for directory in mounts]
        readers = []
        for directory in mounts:
            command = [sys.executable, "-c", READER, str(directory), str(TURNS)]
            reader = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            assert reader.stdout is not None
            assert reader.stdout.readline() == "warm\n"
            readers.append(reader)
        for supervisor in supervisors:
            supervisor.terminate()
        for reader in readers:
            assert reader.communicate(timeout=60)[0] == "10000\n" * TURNS
        _, alive = psutil.wait_procs(supervisors, 60)
        assert not alive
        assert not any(map(is_mounted, mounts))


def test_an_open_file_is_waited_for_until_the_grace_is_over(daemon: Daemon, tmp_path: Path) -> None:
    with ending_mount(daemon, tmp_path / "m", "grace=2") as directory:
        supervisor = psutil.Process(mount_pid(daemon.client, directory))
        with held_open(directory / "0.bin"):
            supervisor.terminate()
            supervisor.wait(60)
        assert is_mounted(directory)
        assert kernel.is_dead(directory)
        for use in (lambda: os.listdir(directory), lambda: (directory / "1.bin").read_bytes()):
            with pytest.raises(OSError, match="Transport endpoint is not connected"):
                use()
        assert "recovered" in cachectl(daemon.socket, "umount", directory).stdout


def test_the_daemon_knows_that_a_mount_ends_and_a_second_signal_ends_the_grace(daemon: Daemon, tmp_path: Path) -> None:
    with ending_mount(daemon, tmp_path / "m", "grace=600") as directory:
        supervisor = psutil.Process(mount_pid(daemon.client, directory))
        with held_open(directory / "0.bin"):
            supervisor.terminate()
            view = until(
                lambda: next(one for one in daemon.status().mounts if one.mountpoint == str(directory)),
                is_right=lambda view: view.ending,
            )
            assert view.alive
            assert mount_state(view) == "ending"
            time.sleep(1.2)  # what comes within a second of the first one is taken for the same
            supervisor.send_signal(signal.SIGINT)
            supervisor.wait(60)
        assert kernel.is_dead(directory)


def test_a_published_job_keeps_the_mount(daemon: Daemon, tmp_path: Path) -> None:
    with ending_mount(daemon, tmp_path / "m", "grace=4") as directory:
        daemon.client.call(
            JOB_PUBLISH,
            JobPublication(job="train", dataset="tree", map=SampleMap(kind="tree"), pid=os.getpid()),
        )
        try:
            supervisor = psutil.Process(mount_pid(daemon.client, directory))
            supervisor.terminate()
            supervisor.wait(60)
            assert kernel.is_dead(directory)
            assert "job train reads it" in Path(f"{directory}.log").read_text()
        finally:
            daemon.client.call(JOB_CANCEL, JOB_CANCEL.request(job="train"))


@pytest.mark.parametrize(("named", "is_dead"), [("this", True), ("other", False)])
def test_a_job_that_says_through_which_mount_it_reads_keeps_that_one_only(
    daemon: Daemon, tmp_path: Path, named: str, is_dead: bool
) -> None:
    with ending_mount(daemon, tmp_path / "m", "grace=2" if is_dead else "grace=600") as directory:
        seen = find_mount_point(directory)
        assert seen is not None
        publication = JobPublication(
            job=f"train-{named}", dataset="tree", map=SampleMap(kind="tree"), pid=os.getpid(),
            mount_device=seen.device if named == "this" else "0:0",
        )  # fmt: skip
        daemon.client.call(JOB_PUBLISH, publication)
        try:
            supervisor = psutil.Process(mount_pid(daemon.client, directory))
            supervisor.terminate()
            supervisor.wait(60)
            assert is_mounted(directory) is is_dead
        finally:
            daemon.client.call(JOB_CANCEL, JOB_CANCEL.request(job=publication.job))


def test_the_next_mount_takes_the_place_of_one_that_ended_in_use(daemon: Daemon, tmp_path: Path) -> None:
    with ending_mount(daemon, tmp_path / "m", "grace=0") as directory:
        supervisor = psutil.Process(mount_pid(daemon.client, directory))
        with held_open(directory / "0.bin"):
            supervisor.terminate()
            supervisor.wait(60)
        assert kernel.is_dead(directory)
        assert run_mount(daemon.socket, "tree", directory).returncode == 0
        assert len(os.listdir(directory)) == FILES


def test_a_free_mount_is_unmounted_however_short_the_grace(daemon: Daemon, tmp_path: Path) -> None:
    """With watches as users have them, which take longer than the grace."""
    with mounted(daemon.socket, "tree", tmp_path / "m", "grace=0") as directory:
        supervisor = psutil.Process(mount_pid(daemon.client, directory))
        supervisor.terminate()
        supervisor.wait(60)
        assert not is_mounted(directory)


@contextlib.contextmanager
def precious_files(directory: Path) -> Iterator[Path]:
    """A tmpfs on *directory*, with a file in it that is nowhere else."""
    subprocess.run(["mount", "-t", "tmpfs", "other", directory], check=True)
    try:
        (directory / "results").write_text("precious")
        yield directory / "results"
    finally:
        subprocess.run(["umount", directory], check=False)


def test_a_mount_that_something_is_mounted_over_unmounts_nothing_else(daemon: Daemon, tmp_path: Path) -> None:
    with ending_mount(daemon, tmp_path / "m", "grace=2") as directory:
        supervisor = psutil.Process(mount_pid(daemon.client, directory))
        with held_open(directory / "0.bin"), precious_files(directory) as results:
            supervisor.terminate()
            supervisor.wait(60)
            assert results.read_text() == "precious"
        assert is_mounted(directory)


def test_a_mount_that_was_detached_leaves_its_successor_alone(daemon: Daemon, tmp_path: Path) -> None:
    with ending_mount(daemon, tmp_path / "m", "grace=2") as directory:
        supervisor = psutil.Process(mount_pid(daemon.client, directory))
        with held_open(directory / "0.bin"):
            kernel.unmount(directory, lazy=True)
            mount_again(daemon.socket, "tree", directory)
            supervisor.terminate()
            supervisor.wait(60)
            assert len(os.listdir(directory)) == FILES


def test_cachectl_does_not_unmount_what_is_mounted_over_a_mount(daemon: Daemon, tmp_path: Path) -> None:
    with ending_mount(daemon, tmp_path / "m") as directory, precious_files(directory) as results:
        done = cachectl(daemon.socket, "umount", directory)
        assert done.returncode
        assert "something else is mounted over the mount" in done.stderr
        assert results.read_text() == "precious"


# Reads a file, and after a pause as long as its reader likes another one.
PAUSING = """
import os, sys
top = sys.argv[1]
first, *others = sorted(os.listdir(top))
open(f"{top}/{first}", "rb").read()
print("read", flush=True)
for line in sys.stdin:
    try:
        print(len(open(f"{top}/{others.pop()}", "rb").read()), flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


@contextlib.contextmanager
def pausing(*command: str) -> Iterator[Callable[[], str]]:
    """A program that has read the mount. The call has it go on, and returns what it says."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def go_on() -> str:
            stdin.write("\n")
            stdin.flush()
            return stdout.readline()

        assert stdout.readline() == "read\n"
        yield go_on


def test_a_reader_that_pauses_gets_an_error_and_no_empty_directory(daemon: Daemon, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        mounts = {
            option: stack.enter_context(ending_mount(daemon, tmp_path / option, option, "grace=4"))
            for option in ("shield=on", "shield=off", "no_zero_open")
        }
        supervisors = [psutil.Process(mount_pid(daemon.client, directory)) for directory in mounts.values()]
        readers = {
            option: stack.enter_context(pausing(sys.executable, "-c", PAUSING, str(directory)))
            for option, directory in mounts.items()
        }
        for supervisor in supervisors:
            supervisor.terminate()
        _, alive = psutil.wait_procs(supervisors, 60)
        assert not alive
        assert {option: go_on() for option, go_on in readers.items()} == dict.fromkeys(
            mounts, "Transport endpoint is not connected\n"
        )
        for directory in mounts.values():
            assert "has read it and still runs" in Path(f"{directory}.log").read_text()


def test_a_mount_that_a_shell_has_listed_with_ls_is_unmounted(daemon: Daemon, tmp_path: Path) -> None:
    with ending_mount(daemon, tmp_path / "m", "grace=600") as directory:
        supervisor = psutil.Process(mount_pid(daemon.client, directory))
        with pausing(
            "sh", "-c", f"ls {directory} > /dev/null; cat {directory}/0.bin > /dev/null; echo read; read line"
        ):
            supervisor.terminate()
            supervisor.wait(60)
            assert not is_mounted(directory)
