"""Publishing by a line in the training code: `cachefs.publish`, `PublishedSampler`, several processes of one job."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest

from cachefs.job_messages import JobEpoch, JobProgress, JobPublication
from cachefs.messages import Empty
from cachefs.rpc import JOB_LIST
from cachefs.snapshot import Snapshot
from tests.as_user import NOBODY, as_user, public_directory
from tests.daemon import Daemon
from tests.helper_process import helper_process
from tests.mounting import mounted
from tests.recording import Recording, recording
from tests.waiting import until
from tests.warm_python import WarmPython

CACHEFS = Path(sys.executable).with_name("cachefs")
SCRIPT = Path(__file__).with_name("training_script.py")
FILES = 12


@dataclass(frozen=True)
class Node:
    daemon: Daemon
    record: Recording
    socket: Path
    mount: Path
    snapshot: Snapshot
    torch_jobs: WarmPython

    def names(self, publish: JobPublication) -> list[str]:
        assert publish.map is not None
        return [os.fsdecode(self.snapshot.path(int(n))) for n in numpy.frombuffer(publish.map.entries, "<u4")]


@pytest.fixture(scope="module")
def node(torch_jobs: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    top = tmp_path_factory.mktemp("origin")
    for number in range(FILES):
        path = top / f"class{number % 3}" / f"{number:02}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(number))
    numpy.save(top / "rows.npy", numpy.zeros((50, 16), numpy.float32))
    home = tmp_path_factory.mktemp("node")
    with Daemon(home) as daemon:
        snapshot = Snapshot(Path(daemon.add_dataset("numbers", f"file://{top}").path))
        with (
            public_directory() as public,
            mounted(daemon.socket, "numbers", public / "numbers") as mount,
            recording(daemon.client, home / "recorded") as record,
        ):
            yield Node(daemon, record, home / "recorded", mount, snapshot, torch_jobs)
        snapshot.close()


def environment(node: Node, job: str) -> dict[str, str]:
    return {**os.environ, "CACHEFS_SOCKET": str(node.socket), "CACHEFS_JOB": job}


def run(
    node: Node,
    job: str,
    code: str,
    *options: str,
    wanted: Callable[[list[JobEpoch]], object] = bool,
    **variables: str,
) -> str:
    """Run the code, with MOUNT in it, as a job of this name, whose stdin ends once the orders are published that are
    wanted. Returns what it prints, when its helper has ended too."""
    process = subprocess.Popen(
        [sys.executable, *options, "-c", prepared(node, code)],
        env={**environment(node, job), **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    name = job or f"c-{process.pid}"
    until(lambda: process.poll() is not None or wanted(node.record.of(JobEpoch, name)), f"orders of job {name}")
    stdout, stderr = process.communicate("", timeout=60)
    assert (process.returncode, stderr) == (0, "")
    until(lambda: helper_process(process.pid) is None)
    return stdout


def is_of(consumers: int) -> Callable[[list[JobEpoch]], object]:
    return lambda said: len({message.consumer for message in said}) == consumers


def prepared(node: Node, code: str) -> str:
    return f"import cachefs, os, sys, time\nMOUNT = {str(node.mount)!r}\n" + textwrap.dedent(code)


def orders(node: Node, job: str) -> dict[int, list[int]]:
    messages = node.record.of(JobEpoch, job)
    return {message.epoch: numpy.frombuffer(message.order, "<u4").tolist() for message in messages}


def test_a_directory_and_a_spec(node: Node) -> None:
    code = prepared(
        node,
        """
        spec = cachefs.SamplerSpec(kind="numpy", size=12, seed=4, epochs=9)
        with cachefs.publish(os.path.join(MOUNT, "class1"), sampler=spec, workers=2, batch_size=4) as publication:
            publication.progress(3, 7)
            sys.stdin.readline()
        sys.stdin.readline()
        """,
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment(node, "spec"), stdin=subprocess.PIPE, text=True
    ) as job:
        assert job.stdin is not None
        for ended in (False, True):
            until(lambda ended=ended: ended in [said.ended for said in node.record.of(JobProgress, "spec")])  # type: ignore[misc]
            job.stdin.write("\n")
            job.stdin.flush()
    assert job.returncode == 0
    (publish,) = node.record.of(JobPublication, "spec")
    assert publish.spec is not None
    assert (publish.spec.seed, publish.spec.epochs, publish.workers, publish.batch_size) == (4, 9, 2, 4)
    assert node.names(publish) == [f"class1/{number:02}.bin" for number in (1, 4, 7, 10)]
    told = node.record.of(JobProgress, "spec")
    assert (told[-1].epoch, told[-1].position, told[-1].ended) == (3, 7, True)


def test_paths_and_orders(node: Node) -> None:
    run(
        node,
        "orders",
        """
        from pathlib import Path
        os.chdir(MOUNT)
        publication = cachefs.publish([Path("class2/02.bin"), "class0/00.bin", "class0/../class1/01.bin"], rank=3,
                                      world_size=8, consumer="mine")
        publication.order(0, [2, 0, 1])
        publication.order(1, (1, 1, 0))
        sys.stdin.read()
        """,
        wanted=lambda said: len(said) == 2,
    )
    (publish,) = node.record.of(JobPublication, "orders")
    assert (publish.consumer, publish.rank, publish.world_size) == ("mine", 3, 8)
    assert node.names(publish) == ["class2/02.bin", "class0/00.bin", "class1/01.bin"]
    assert orders(node, "orders") == {0: [2, 0, 1], 1: [1, 1, 0]}


def test_a_publication_does_not_begin_where_the_last_one_was(node: Node) -> None:
    run(
        node,
        "next",
        """
        with cachefs.publish(MOUNT) as first:
            first.order(5, [0])
            first.progress(5, 1)
        second = cachefs.publish(MOUNT)
        second.order(0, [1, 2])
        sys.stdin.read()
        """,
        wanted=lambda said: said and said[-1].epoch == 0,
    )
    assert orders(node, "next")[0] == [1, 2]


def test_records_of_a_file(node: Node) -> None:
    run(
        node,
        "records",
        """
        publication = cachefs.publish([MOUNT + "/rows.npy"], records="npy")
        publication.order(0, range(49, -1, -1))
        sys.stdin.read()
        """,
    )
    (publish,) = node.record.of(JobPublication, "records")
    assert publish.map is not None
    assert (publish.map.kind, publish.map.indexer) == ("records", "npy")
    assert node.names(publish) == ["rows.npy"]
    assert orders(node, "records") == {0: list(range(49, -1, -1))}


def test_a_sampler_publishes_what_it_says(node: Node) -> None:
    code = prepared(
        node,
        """
        import json, pickle, torch
        from pathlib import Path
        from torch.utils.data import DataLoader, DistributedSampler

        class Files:
            samples = [(f"{MOUNT}/class{n % 3}/{n:02}.bin", 0) for n in range(12)]
            def __len__(self): return 12
            def __getitem__(self, index): return index

        inner = DistributedSampler(Files(), num_replicas=2, rank=0, seed=8)
        sampler = pickle.loads(pickle.dumps(cachefs.PublishedSampler(inner, Files(), workers=0, batch_size=2)))
        loader = DataLoader(Files(), 2, sampler=sampler)
        for epoch in (4, 5):
            sampler.set_epoch(epoch)
            print(json.dumps([int(index) for batch in loader for index in batch]), flush=True)
            sys.stdin.readline()
        assert len(sampler) == 6
        """,
    )
    with node.torch_jobs.start(
        [sys.executable, "-c", code],
        env=environment(node, "sampler"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        for epoch in (4, 5):
            read = json.loads(job.stdout.readline())
            until(lambda epoch=epoch: orders(node, "sampler").get(epoch))  # type: ignore[misc]
            assert orders(node, "sampler")[epoch] == read
            job.stdin.write("\n")
            job.stdin.flush()
        assert job.wait(60) == 0
        until(lambda: helper_process(job.pid) is None)
    assert node.record.of(JobProgress, "sampler")[-1].epoch == 5


def test_run_leaves_a_published_sampler_to_itself(node: Node, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, time, cachefs
            sys.path.insert(0, {str(SCRIPT.parent)!r})
            from training_script import Listed
            from torch.utils.data import DataLoader, RandomSampler
            dataset = Listed({str(node.mount)!r})
            sampler = cachefs.PublishedSampler(RandomSampler(dataset), dataset)
            list(DataLoader(dataset, 4, sampler=sampler))
            sys.stdin.read()
            """
        )
    )
    line = [CACHEFS, "run", sys.executable, script]
    with node.torch_jobs.start(line, env=environment(node, "both"), stdin=subprocess.PIPE) as job:
        until(lambda: job.poll() is not None or orders(node, "both"))
        job.communicate("", timeout=60)
    assert job.returncode == 0
    (publish,) = node.record.of(JobPublication, "both")
    assert publish.source == "cachefs.publish"


def test_a_forked_process_is_a_consumer_of_its_own(node: Node) -> None:
    run(
        node,
        "forked",
        """
        publication = cachefs.publish(MOUNT)
        publication.order(0, range(12))
        if os.fork() == 0:
            publication.order(0, range(11, -1, -1))
            sys.stdin.read()
            os._exit(0)
        os.wait()
        """,
        wanted=is_of(2),
    )
    published = node.record.of(JobPublication, "forked")
    assert len({(message.consumer, message.pid) for message in published}) == 2
    told = {
        message.consumer: numpy.frombuffer(message.order, "<u4").tolist()
        for message in node.record.of(JobEpoch, "forked")
    }
    assert sorted(told.values()) == [list(range(12)), list(range(11, -1, -1))]


def test_a_user_who_may_not_use_the_socket_publishes_through_the_mount(node: Node) -> None:
    code = prepared(
        node,
        """
        publication = cachefs.publish(MOUNT)
        publication.order(0, [0])
        sys.stdin.read()
        publication.progress(0, 1)
        print("the end")
        """,
    )
    job = subprocess.Popen(
        [*as_user(NOBODY), sys.executable, "-c", code],
        env=environment(node, "nobody"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: any(one.job == "nobody~control" for one in node.daemon.client.call(JOB_LIST, Empty()).jobs))
        assert job.communicate("", timeout=60) == ("the end\n", "")
    finally:
        job.kill()


def test_packages_for_another_python_do_not_reach_the_helper(node: Node, tmp_path: Path) -> None:
    for package in ("msgspec", "grpc", "site", "usercustomize"):
        (tmp_path / f"{package}.py").write_text("raise RuntimeError('for another Python')\n")
    (tmp_path / "usercustomize.py").unlink()
    code = "cachefs.publish(MOUNT).order(0, [0]); sys.stdin.read()"
    run(node, "isolated", code, "-W", "error", PYTHONPATH=str(tmp_path))
    assert node.record.of(JobPublication, "isolated")


def test_a_job_without_stdio_publishes(node: Node) -> None:
    code = prepared(node, "p = cachefs.publish(MOUNT); p.order(0, [0]); p.progress(0, 1); time.sleep(100)")
    line = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    job = subprocess.Popen(line, env=environment(node, "closed"))
    try:
        until(lambda: job.poll() is not None or orders(node, "closed"))
        assert job.poll() is None
    finally:
        job.kill()
        job.wait()
    assert orders(node, "closed") == {0: [0]}


def test_a_job_is_named_after_its_script_and_process(node: Node) -> None:
    code = "cachefs.publish(MOUNT).order(0, [0]); print(os.getpid()); sys.stdin.read()"
    pid = run(node, "", code).strip()
    assert node.record.of(JobPublication, f"c-{pid}")


def test_who_was_started_by_a_publishing_process_does_not_take_its_place(node: Node) -> None:
    """All three have the same job and the same rank."""
    run(
        node,
        "family",
        """
        import subprocess
        publication = cachefs.publish(MOUNT)
        publication.order(0, range(12))
        if len(sys.argv) == 1:
            child = subprocess.Popen([*sys.orig_argv, "child"])
            if os.fork() == 0:
                publication.order(0, range(12))
                sys.stdin.read()
                os._exit(0)
            os.wait(), child.wait()
        sys.stdin.read()
        """,
        wanted=is_of(3),
        RANK="2",
        WORLD_SIZE="4",
    )
    published = {(message.consumer, message.rank) for message in node.record.of(JobPublication, "family")}
    pids = {message.pid for message in node.record.of(JobPublication, "family")}
    named = {("2" if len(consumer) == 1 else f"2.pid-{consumer[6:]}", rank) for consumer, rank in published}
    assert len(published) == len(pids) == 3
    assert named == published
    assert ("2", 2) in published


def _is_all_known(node: Node, job: str) -> bool:
    """Has each of two ranks published the files of all samples?"""
    said = node.record.of(JobPublication, job)
    last = {message.consumer: message for message in said}
    return len(last) == 2 and all(len(node.names(message)) == FILES for message in last.values())


def test_ranks_share_what_each_has_learned(node: Node, tmp_path: Path) -> None:
    """Two processes that each read half of the samples of epoch 0 know all of epoch 1."""
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import select, sys, time
            from pathlib import Path
            sys.path.insert(0, {str(SCRIPT.parent)!r})
            from training_script import Hidden
            from torch.utils.data import DataLoader, DistributedSampler
            rank, meeting = int(sys.argv[1]), Path({str(tmp_path)!r})

            class Meeting(Hidden):
                def __getitem__(self, index):
                    # Both helpers are there before anything is read; a loader's worker begins to read at once.
                    while len(list(meeting.glob("rank?"))) < 2:
                        time.sleep(0.01)
                    return super().__getitem__(index)

            dataset = Meeting({str(node.mount)!r})
            sampler = DistributedSampler(dataset, num_replicas=2, rank=rank)
            loader = DataLoader(dataset, 2, sampler=sampler, num_workers=1)
            for epoch in range(2):
                sampler.set_epoch(epoch)
                iterator = iter(loader)
                (meeting / f"rank{{rank}}").touch()
                list(iterator)
                # What was learned is told once a second, or later on a busy machine; the rest after the next epoch.
                select.select([sys.stdin], [], [], None if epoch else 3)
            """
        )
    )
    ranks = [
        node.torch_jobs.start(
            [CACHEFS, "run", "--job", "ranks", sys.executable, script, str(rank)],
            env={**environment(node, "ranks"), "RANK": str(rank), "WORLD_SIZE": "2"},
            stdin=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    until(lambda: _is_all_known(node, "ranks") or any(rank.poll() is not None for rank in ranks))
    for rank in ranks:
        rank.communicate("", timeout=60)
    assert [rank.returncode for rank in ranks] == [0, 0]
    for name in ("0", "1"):
        last = [message for message in node.record.of(JobPublication, "ranks") if message.consumer == name][-1]
        assert len(node.names(last)) == FILES
        # So it is for the daemon to compute what each rank reads.
        assert last.spec is not None


def test_a_rank_that_begins_later_is_told_what_was_learned(node: Node, tmp_path: Path) -> None:
    """Each of two processes learns half of the files. The second begins when the first has learned its half; and its
    consumer begins only after it was told in vain."""
    code = prepared(
        node,
        f"""
        from pathlib import Path
        from cachefs.publishing.channel import HelperConnection, MessageKind, own_channel
        from cachefs.publishing.publication import Publication
        rank, here = int(sys.argv[1]), Path({str(tmp_path)!r})
        files = sorted(str(path) for path in Path(MOUNT).rglob("*.bin"))
        own_channel()  # from here on there is a helper
        if rank:
            time.sleep(1.5)
        publication = Publication((), {{"length": len(files), "learn": True, "source": "test"}})
        observed = [([sample], [files[sample]]) for sample in range(rank, len(files), 2)]
        opened = {{"op": MessageKind.OPENED, "slot": 0, "length": len(files), "observed": observed}}
        HelperConnection(own_channel().directory).send(opened)
        publication.order(0, range(len(files)))
        while not (here / "known").exists():
            time.sleep(0.01)
        """,
    )
    ranks = []
    try:
        for rank in ("0", "1"):
            variables = {**environment(node, "late"), "RANK": rank, "WORLD_SIZE": "2"}
            ranks.append(subprocess.Popen([sys.executable, "-c", code, rank], env=variables))
            until(lambda: helper_process(ranks[-1].pid))
        until(lambda: _is_all_known(node, "late"))
    finally:
        (tmp_path / "known").touch()
        assert [rank.wait(60) for rank in ranks] == [0, 0]


def test_what_a_killed_helper_left_is_swept_away(node: Node) -> None:
    left = Path(f"/dev/shm/cachefs-{os.geteuid()}/job-long-gone/1-x")
    left.mkdir(parents=True, mode=0o700, exist_ok=True)
    left.parents[1].chmod(0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(left / "s"))
    os.utime(left / "s", (0, 0))
    empty = left.parents[1] / "empty"
    empty.mkdir(mode=0o700, exist_ok=True)
    os.utime(empty, (0, 0))
    run(node, "sweeper", "cachefs.publish(MOUNT).order(0, [0]); sys.stdin.read()")
    assert not left.parent.exists()
    assert not empty.exists()
