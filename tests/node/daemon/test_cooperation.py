"""Two real daemons whose ranks share a dataset out: a block leaves the origin once, and copies go where they are read
next."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cachefs.job_messages import JobProgress, JobPublication
from cachefs.messages import BlockRef, FetchRequest
from cachefs.planning.sequences.sampler import SamplerSpec, epoch_order
from cachefs.rpc import JOB_PROGRESS, JOB_PUBLISH
from cachefs.snapshot import Snapshot
from tests.daemon import Daemon
from tests.fetching import FetchClient
from tests.node.daemon.test_cluster_datasets import datasets, two_daemons
from tests.waiting import until

FILES, EPOCHS, BATCH = 400, 3, 10
SPEC = SamplerSpec(kind="torch-distributed", size=FILES, epochs=EPOCHS, replicas=2)


@dataclass
class Rank:
    """Reads as a mount does, and says how far it is."""

    daemon: Daemon
    number: int
    snapshot: str
    entries: list[int]  # of the files, in order of their paths

    def __post_init__(self) -> None:
        self.spec = replace(SPEC, rank=self.number)
        self.name = f"rank{self.number}"
        self.channel = FetchClient(self.daemon.socket)
        request = JobPublication(
            job="train", dataset="images", spec=self.spec, consumer=self.name, rank=self.number, world_size=2,
            batch_size=BATCH, pid=os.getpid(),
        )  # fmt: skip
        self.daemon.client.call(JOB_PUBLISH, request)

    def read(self, epoch: int, start: int) -> None:
        samples = epoch_order(self.spec, epoch)[start : start + BATCH]
        refs = [BlockRef(self.snapshot, self.entries[int(sample)], 0) for sample in samples]
        answers = self.channel.call(FetchRequest(blocks=refs, deadline=20.0))
        assert [answer.message for answer in answers if answer.errno] == []
        place = JobProgress(job="train", consumer=self.name, epoch=epoch, position=start + len(samples))
        self.daemon.client.call(JOB_PROGRESS, place)


def entries_of(daemon: Daemon) -> list[int]:
    snapshot = Snapshot(Path(datasets(daemon)["images"].path))
    try:
        found = [snapshot.find_path(f"{number:04}".encode()) for number in range(FILES)]
    finally:
        snapshot.close()
    return [entry.number for entry in found if entry is not None]


def test_each_block_leaves_the_origin_once_and_reads_become_local(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for number in range(FILES):
        (files / f"{number:04}").write_bytes(np.random.default_rng(number).bytes(2000))
    with two_daemons(tmp_path) as daemons:
        view = daemons[0].add_dataset("images", files.as_uri())
        until(lambda: "images" in datasets(daemons[1]))
        entries = entries_of(daemons[0])
        ranks = [Rank(daemon, number, view.snapshot, entries) for number, daemon in enumerate(daemons)]
        for daemon in daemons:
            until(
                lambda daemon=daemon: (
                    "copies go where they are read next, by the epochs of job train" in daemon.log.read_text()
                )
            )
        from_peers = []
        for epoch in range(EPOCHS):
            before = sum(daemon.status().peers.blocks for daemon in daemons)
            for start in range(0, FILES // 2, BATCH):
                for rank in ranks:
                    rank.read(epoch, start)
            from_peers.append(sum(daemon.status().peers.blocks for daemon in daemons) - before)
        # Where a node is late to answer, on a busy machine, the origin is asked beside it. Two caches: 2.
        assert FILES <= sum(daemon.status().fetched_blocks for daemon in daemons) <= 1.2 * FILES
        assert all(count < 0.5 * FILES for count in from_peers[1:]), "as many as if blocks stayed at home"
        for rank in ranks:
            rank.channel.close()
