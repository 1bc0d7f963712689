"""Jobs in containers that see only the mount: no socket of the daemon, and a pid namespace of their own."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from cachefs.job_messages import JobName, JobView
from cachefs.messages import Empty
from cachefs.rpc import JOB_LIST, JOB_SHOW
from tests.as_user import NOBODY, public_directory
from tests.containers import DATA, contained
from tests.daemon import Daemon
from tests.mounting import mount_pid, mounted
from tests.waiting import until

FILES = 12
SAMPLES = 200_000
# It reads one file again and again, says what comes next, and ends when its stdin does.
PUBLISHES = f"""
publication = cachefs.publish(["{DATA}/00.bin", "{DATA}/01.bin"])
publication.order(0, [1, 0])
publication.progress(0, 1)
sys.stdin.read()
print("the end")
"""


@dataclass(frozen=True)
class Node:
    daemon: Daemon
    mount: Path

    def job(self, name: str, seen: Callable[[JobView], object]) -> JobView:
        """The job, once the daemon shows it so."""
        found: list[JobView] = []

        def is_so() -> bool:
            jobs = self.daemon.client.call(JOB_LIST, Empty()).jobs
            found[:] = [self.daemon.client.call(JOB_SHOW, JobName(job=job.job)) for job in jobs if job.job == name]
            return bool(found) and bool(seen(found[0]))

        until(is_so)
        return found[0]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    top = tmp_path_factory.mktemp("origin")
    for number in range(FILES):
        (top / f"{number:02}.bin").write_text(str(number))
    (top / "part").mkdir()
    (top / "part" / "12.bin").write_text("12")
    with Daemon(tmp_path_factory.mktemp("node")) as daemon:
        daemon.add_dataset("numbers", f"file://{top}")
        with public_directory() as public, mounted(daemon.socket, "numbers", public / "numbers") as mount:
            yield Node(daemon, mount)


def start(wrapper: list[str], code: str, job: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "CACHEFS_JOB": job, "CACHEFS_SOCKET": "/run/none/s", "HOME": "/", **variables}
    return subprocess.Popen(
        [*wrapper, sys.executable, "-c", "import cachefs, sys, time\n" + textwrap.dedent(code)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def is_at(epoch: int, position: int) -> Callable[[JobView], object]:
    return lambda view: (
        view.state == "running" and [(one.epoch, one.position) for one in view.consumers] == [(epoch, position)]
    )


@pytest.mark.parametrize("who", ["root", "nobody", "user-namespace"])
def test_a_container_that_sees_only_the_mount_publishes(node: Node, who: str) -> None:
    wrapper = contained(node.mount, uid=NOBODY if who == "nobody" else 0, user_namespace=who == "user-namespace")
    job = start(wrapper, PUBLISHES, who)
    try:
        view = node.job(f"{who}~control", is_at(0, 1))
        assert (view.dataset, view.source) == ("numbers", "control file: cachefs.publish")
        (consumer,) = view.consumers
        # The first process of each container has number 1.
        assert consumer.consumer.startswith("pid-1@")
        assert (consumer.epoch_length, consumer.known_epochs) == (2, [0])
        assert job.communicate(timeout=60) == ("the end\n", "")
    finally:
        job.kill()
    assert node.job(f"{who}~control", lambda view: view.state != "running").state == "ended"


def ends_when_killed(node: Node, job: subprocess.Popen[str], name: str) -> None:
    """Kill the process inside once its first sample was reported: the job of that name ends, as its process is gone."""
    try:
        node.job(name, is_at(0, 1))
        (inside,) = psutil.Process(job.pid).children()
        inside.kill()
        job.wait(60)
        view = node.job(name, lambda view: view.state != "running")
    finally:
        job.kill()
    assert view.reason.startswith("its process ")


def test_a_container_that_is_killed_ends_its_job_also_while_others_read_its_files(node: Node) -> None:
    """The daemon sees its process, though nobody says so; else it would end with its lease."""
    ends_when_killed(node, start(contained(node.mount), PUBLISHES, "killed"), "killed~control")


def test_the_ranks_of_a_container_publish_at_once(node: Node) -> None:
    """Their maps and orders have two hundred times what a line of the control file may have."""
    ranks = f"""
    import subprocess
    code = '''
    import cachefs, random, sys
    files = ["{DATA}/%02d.bin" % (number % {FILES}) for number in range({SAMPLES})]
    publication = cachefs.publish(files, world_size=2)
    publication.order(0, random.sample(range({SAMPLES}), {SAMPLES}))
    publication.progress(0, 7)
    sys.stdin.read()
    '''
    import os, textwrap
    line = [sys.executable, "-c", textwrap.dedent(code)]
    ranks = [subprocess.Popen(line, env={{**os.environ, "RANK": str(n), "WORLD_SIZE": "2"}}) for n in range(2)]
    sys.exit(any(rank.wait() for rank in ranks))
    """
    job = start(contained(node.mount), ranks, "ranks")
    try:
        view = node.job(
            "ranks~control",
            lambda view: len(view.consumers) == 2 and all(one.epoch_length == SAMPLES for one in view.consumers),
        )
        assert sorted(one.consumer for one in view.consumers) == ["0", "1"]
        assert job.communicate(timeout=60) == ("", "")
    finally:
        job.kill()
    node.job("ranks~control", lambda view: view.state == "ended")


def test_a_restart_of_the_daemon_or_of_who_reads_the_control_file_ends_no_job(node: Node) -> None:
    steps = """
    publication = cachefs.publish(["/data/00.bin", "/data/01.bin", "/data/02.bin"])
    publication.order(0, [2, 1, 0])
    for position, _ in enumerate(sys.stdin, 1):
        publication.progress(0, position)
    """
    job = start(contained(node.mount), steps, "restarts")
    assert job.stdin is not None

    def step() -> None:
        assert job.stdin is not None
        job.stdin.write("\n")
        job.stdin.flush()

    try:
        step()
        node.job("restarts~control", is_at(0, 1))
        for process in psutil.Process(mount_pid(node.daemon.client, node.mount)).children():
            if Path(f"/proc/{process.pid}/comm").read_text() == "control\n":
                process.send_signal(signal.SIGKILL)
        step()
        node.job("restarts~control", is_at(0, 2))
        node.daemon.kill9()
        step()
        node.daemon.start()
        view = node.job("restarts~control", is_at(0, 3))
        assert view.consumers[0].epoch_length == 3
        assert job.communicate("", timeout=60) == ("", "")
    finally:
        job.kill()


def test_a_job_that_is_the_first_of_its_namespace_ends_with_it(node: Node) -> None:
    """Over the socket: the kernel kills the helper too, so nobody tells the daemon but /proc."""
    job = start(
        ["unshare", "--pid", "--fork", "--kill-child"],
        f"""
        publication = cachefs.publish(["{node.mount}/00.bin", "{node.mount}/01.bin"])
        publication.order(0, [1, 0])
        publication.progress(0, 1)
        sys.stdin.read()
        """,
        "first",
        CACHEFS_SOCKET=str(node.daemon.socket),
    )
    ends_when_killed(node, job, "first")


def test_where_a_directory_of_the_mount_is_seen_both_ways_are_named_in_one_line(node: Node) -> None:
    """The control file is not below that."""
    code = """
    publication = cachefs.publish(["/data/12.bin"])
    publication.order(0, [0])
    while not publication._channel.page.log_length:
        time.sleep(0.01)
    publication.progress(0, 1)
    print("the end")
    """
    job = start(contained(node.mount / "part"), code, "directory")
    try:
        out, err = job.communicate(timeout=60)
    finally:
        job.kill()
    assert out == "the end\n"
    (line,) = err.splitlines()
    assert line.startswith(
        "cachefs: there is no socket /run/none/s here, and nothing can be published through /data/.c"
    )
