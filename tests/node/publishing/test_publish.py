"""Publishing by a line in the training code: `cachefs.publish`, `PublishedSampler`, several processes of one job."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest

from cachefs.job_messages import JobEpoch, JobProgress, JobPublish
from cachefs.snapshot import Snapshot
from tests.daemon import Daemon
from tests.mounting import mounted
from tests.recording import Recording, recording

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

    def names(self, publish: JobPublish) -> list[str]:
        assert publish.map is not None
        return [os.fsdecode(self.snapshot.path(int(n))) for n in numpy.frombuffer(publish.map.entries, "<u4")]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
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
            mounted(daemon.socket, "numbers", tmp_path_factory.mktemp("mnt") / "numbers") as mount,
            recording(daemon.client, home / "recorded") as record,
        ):
            yield Node(daemon, record, home / "recorded", mount, snapshot)
        snapshot.close()


def environment(node: Node, job: str) -> dict[str, str]:
    told = {"TOLD": str(node.record.notes), "PYTHONPATH": str(SCRIPT.parent)}
    return {**os.environ, **told, "CACHEFS_SOCKET": str(node.socket), "CACHEFS_JOB": job}


def run(node: Node, job: str, code: str) -> str:
    """Run the code, with MOUNT in it, as a job of this name; returns what it prints."""
    code = f"import cachefs, os, time\nMOUNT = {str(node.mount)!r}\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(node, job),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def orders(node: Node, job: str) -> dict[int, list[int]]:
    messages = node.record.of(JobEpoch, job)
    return {message.epoch: numpy.frombuffer(message.order, "<u4").tolist() for message in messages}


def test_a_directory_and_a_spec(node: Node) -> None:
    run(
        node,
        "spec",
        """
        spec = cachefs.SamplerSpec(kind="numpy", size=12, seed=4, epochs=9)
        with cachefs.publish(os.path.join(MOUNT, "class1"), sampler=spec, workers=2, batch_size=4) as publication:
            publication.progress(3, 7)
            time.sleep(1)
        """,
    )
    (publish,) = node.record.of(JobPublish, "spec")
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
        time.sleep(1)
        """,
    )
    (publish,) = node.record.of(JobPublish, "orders")
    assert (publish.consumer, publish.rank, publish.world_size) == ("mine", 3, 8)
    assert node.names(publish) == ["class2/02.bin", "class0/00.bin", "class1/01.bin"]
    assert orders(node, "orders") == {0: [2, 0, 1], 1: [1, 1, 0]}


def test_records_of_a_file(node: Node) -> None:
    run(
        node,
        "records",
        """
        publication = cachefs.publish([MOUNT + "/rows.npy"], records="npy")
        publication.order(0, range(49, -1, -1))
        time.sleep(1)
        """,
    )
    (publish,) = node.record.of(JobPublish, "records")
    assert publish.map is not None
    assert (publish.map.kind, publish.map.indexer) == ("records", "npy")
    assert node.names(publish) == ["rows.npy"]
    assert orders(node, "records") == {0: list(range(49, -1, -1))}


def test_a_sampler_publishes_what_it_says(node: Node) -> None:
    printed = run(
        node,
        "sampler",
        """
        import json, pickle, torch
        from torch.utils.data import DataLoader, DistributedSampler
        from told import wait_until_told

        class Files:
            samples = [(f"{MOUNT}/class{n % 3}/{n:02}.bin", 0) for n in range(12)]
            def __len__(self): return 12
            def __getitem__(self, index): return index

        inner = DistributedSampler(Files(), num_replicas=2, rank=0, seed=8)
        sampler = pickle.loads(pickle.dumps(cachefs.PublishedSampler(inner, Files(), workers=0, batch_size=2)))
        loader = DataLoader(Files(), 2, sampler=sampler)
        for epoch in (4, 5):
            sampler.set_epoch(epoch)
            print(json.dumps([int(index) for batch in loader for index in batch]))
            wait_until_told("JobProgress", epoch)
        assert len(sampler) == 6
        """,
    )
    read = [json.loads(line) for line in printed.splitlines()]
    assert orders(node, "sampler") == {4: read[0], 5: read[1]}
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
            time.sleep(1)
            """
        )
    )
    subprocess.run([CACHEFS, "run", sys.executable, script], env=environment(node, "both"), timeout=60, check=True)
    (publish,) = node.record.of(JobPublish, "both")
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
            time.sleep(1)
            os._exit(0)
        os.wait()
        """,
    )
    published = node.record.of(JobPublish, "forked")
    assert len({(message.consumer, message.pid) for message in published}) == 2
    told = {
        message.consumer: numpy.frombuffer(message.order, "<u4").tolist()
        for message in node.record.of(JobEpoch, "forked")
    }
    assert sorted(told.values()) == [list(range(12)), list(range(11, -1, -1))]


def test_nothing_is_raised_where_nothing_can_be_published(tmp_path: Path) -> None:
    code = f"""
import cachefs, time
publication = cachefs.publish([{str(tmp_path / "file")!r}])
publication.order(0, ["no number"])
publication.order(0, [0])
publication.progress(0, 1)
publication.close()
nowhere = cachefs.publish({str(tmp_path / "nowhere")!r})
nowhere.order(0, [0])
time.sleep(1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    first, second = done.stderr.splitlines()
    assert "cannot publish (invalid literal" in first
    assert "nowhere: No such file or directory" in second


def test_files_that_are_none_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import cachefs; cachefs.publish([3])"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "TypeError: list does not say which files its samples are; give their paths" in done.stderr


def _is_all_known(node: Node) -> bool:
    """Has each of two ranks published the files of all samples?"""
    said = node.record.of(JobPublish, "ranks")
    last = {message.consumer: message for message in said}
    return len(last) == 2 and all(len(node.names(message)) == FILES for message in last.values())


def test_ranks_share_what_each_has_learned(node: Node, tmp_path: Path) -> None:
    """Two processes that each read half of the samples of epoch 0 know all of epoch 1."""
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, time
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
                # What was learned is told once a second, or later on a busy machine.
                for _ in range(3000):
                    if (meeting / "known").exists():
                        break
                    time.sleep(0.01)
            """
        )
    )
    ranks = [
        subprocess.Popen(
            [CACHEFS, "run", "--job", "ranks", sys.executable, script, str(rank)],
            env={**environment(node, "ranks"), "RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]
    deadline = time.monotonic() + 30
    while not _is_all_known(node) and time.monotonic() < deadline:
        time.sleep(0.05)
    (tmp_path / "known").touch()
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    for rank in ("0", "1"):
        last = [message for message in node.record.of(JobPublish, "ranks") if message.consumer == rank][-1]
        assert len(node.names(last)) == FILES
        # So it is for the daemon to compute what each rank reads.
        assert last.spec is not None


def test_what_a_killed_helper_left_is_swept_away(node: Node) -> None:
    left = Path(f"/dev/shm/cachefs-{os.geteuid()}/job-long-gone/1-x")
    left.mkdir(parents=True, mode=0o700, exist_ok=True)
    left.parents[1].chmod(0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(left / "s"))
    os.utime(left / "s", (0, 0))
    run(node, "sweeper", "cachefs.publish(MOUNT).order(0, [0]); time.sleep(1)")
    assert not left.parent.exists()
