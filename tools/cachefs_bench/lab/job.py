"""A job of the lab: a reader on each of its nodes, which publishes its sequence."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from cachefs.errors import CachefsError
from cachefs.job_messages import JobProgress, JobPublication, SampleMap
from cachefs.planning.sequences.sampler_spec import SamplerSpec
from cachefs.rpc import JOB_PROGRESS, JOB_PUBLISH
from cachefs_bench.lab.host import wait_for
from cachefs_bench.lab.node import LabNode
from cachefs_bench.lab.reader import EpochResult, ReadProblem, ScriptKind
from cachefs_tools.child_programs import KILL_WITH_PARENT, program_path, wait_or_kill

_START_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Parameters of a job's reads."""

    name: str
    dataset: str
    files: int  # of the dataset
    epochs: int
    seed: int = 0
    rate: float = 100.0  # samples per second of each rank
    threads: int = 4
    publish: bool = True
    torch: ScriptKind | None = None  # trains with torch under `cachefs run`, which publishes the sequence
    begin: int = 0  # number of its first file in the dataset
    paths: tuple[bytes, ...] = ()  # of its files; empty: all of the dataset


@dataclass(slots=True)
class ReaderProgress:
    """The reports of a reader so far."""

    ready: bool = False
    epoch: int = 0
    position: int = 0  # reads of the epoch
    when: float = 0.0  # monotonic time of that report
    results: list[EpochResult] = field(default_factory=list)
    troubles: list[ReadProblem] = field(default_factory=list)


class LabRank:
    """The process of one rank, which reads."""

    def __init__(self, job: JobSettings, node: LabNode, rank: int, ranks: int, first: int = 0) -> None:
        self.node = node
        self.rank = rank
        self.progress = ReaderProgress()
        self.spec = SamplerSpec(
            kind="torch-distributed", size=job.files, seed=job.seed, epochs=job.epochs, replicas=ranks, rank=rank
        )
        self._job = job
        self._first = first
        self._log = node.work / f"{job.name}-{rank}.log"
        reader = [sys.executable, "-m", "cachefs_bench.lab.reader"]
        if job.torch is not None:
            under = [program_path("cachefs"), "run", "--job", job.name, "--socket", str(node.socket), "--"]
            reader = [*under, sys.executable, "-m", "cachefs_bench.lab.torch_reader", "--script", job.torch]
        command = [
            *KILL_WITH_PARENT, *node.host.enter_command, *reader,
            str(node.mountpoint), "--files", str(job.files), "--epochs", str(job.epochs), "--rank", str(rank),
            "--replicas", str(ranks), "--seed", str(job.seed), "--threads", str(job.threads), "--rate", str(job.rate),
            "--first", str(first), "--begin", str(job.begin),
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        self._listener = threading.Thread(target=self._listen, name=f"{job.name}-{rank}", daemon=True)
        self._listener.start()

    def publish_sequence(self) -> None:
        """Publish the sequence from the reader's first epoch on, unless the job does so itself. May be repeated, for
        instance after a restart."""
        job = self._job
        if not job.publish or job.torch is not None:
            return
        publication = JobPublication(
            job=job.name, dataset=job.dataset, consumer=str(self.rank), spec=self.spec, map=self._sample_map(),
            rank=self.rank, world_size=self.spec.replicas, workers=job.threads, batch_size=1, prefetch=1,
            pid=self._process.pid, source="lab",
        )  # fmt: skip
        self.node.client.call(JOB_PUBLISH, publication)
        if self._first:
            progress = JobProgress(job=job.name, consumer=str(self.rank), epoch=self._first, position=0)
            self.node.client.call(JOB_PROGRESS, progress)

    def _sample_map(self) -> SampleMap:
        return SampleMap(kind="files", paths=list(self._job.paths)) if self._job.paths else SampleMap(kind="tree")

    def wait_ready(self) -> None:
        """Wait until the reader has found its files."""
        wait_for(lambda: self.progress.ready or not self.is_running, _START_SECONDS, f"{self._log.name} is ready")
        self._require_running()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def start_epoch(self, word: str = "go") -> None:
        """Let the reader read an epoch; `on`: all remaining ones."""
        self._require_running()
        assert self._process.stdin is not None
        self._process.stdin.write(word.encode() + b"\n")
        self._process.stdin.flush()

    def has_read(self, epoch: int) -> bool:
        """Return whether the reader has read an epoch. Raises CachefsError if it has ended before."""
        if any(result.epoch == epoch for result in self.progress.results):
            return True
        self._require_running()
        return False

    def stop(self, kill: bool = False) -> None:
        """End the reader: after its current reads, or at once."""
        assert self._process.stdin is not None
        if kill:
            self._process.kill()
        else:
            self._process.terminate()
        wait_or_kill(self._process)
        self._listener.join(_START_SECONDS)

    def _require_running(self) -> None:
        if not self.is_running and self._process.returncode:
            log = self._log.read_text(errors="replace")[-1500:].strip()
            raise CachefsError(f"the reader {self._log.stem} ended with status {self._process.returncode}: {log}")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message: dict[str, Any] = json.loads(line)
            if "ready" in message:
                self.progress.ready = True
            elif "at" in message:
                self.progress.epoch, self.progress.position, self.progress.when = message["at"]
            elif "trouble" in message:
                self.progress.troubles.append(ReadProblem(**message["trouble"]))
            else:
                self.progress.results.append(EpochResult(**message["epoch"]))


class LabJob:
    """A running job."""

    def __init__(self, settings: JobSettings, ranks: list[LabRank]) -> None:
        self.settings = settings
        self.ranks = ranks

    def run_epoch(self, number: int, seconds: float, ranks: Sequence[LabRank] | None = None) -> None:
        """Let these ranks (None: all) read an epoch, and wait until all have."""
        self.begin_epoch(ranks)
        self.wait_for_epoch(number, seconds, ranks)

    def begin_epoch(self, ranks: Sequence[LabRank] | None = None) -> None:
        """Let these ranks (None: all) read their next epoch."""
        for rank in self.ranks if ranks is None else ranks:
            rank.start_epoch()

    def wait_for_epoch(self, number: int, seconds: float, ranks: Sequence[LabRank] | None = None) -> None:
        """Wait until these ranks (None: all) have read an epoch."""
        wait_for(lambda: self.has_read(number, ranks), seconds, f"all ranks have read epoch {number}")

    def has_read(self, number: int, ranks: Sequence[LabRank] | None = None) -> bool:
        """Return whether these ranks (None: all) have read an epoch. Raises CachefsError if one has ended before."""
        return all(rank.has_read(number) for rank in (self.ranks if ranks is None else ranks))

    def replace_rank(self, rank: LabRank, first: int) -> LabRank:
        """Replace a reader that has ended by a new one, which begins with epoch *first*."""
        anew = LabRank(self.settings, rank.node, rank.rank, len(self.ranks), first)
        anew.progress.results = rank.progress.results
        anew.progress.troubles = rank.progress.troubles
        self.ranks[self.ranks.index(rank)] = anew
        anew.publish_sequence()
        anew.wait_ready()
        return anew

    def results(self, since: int = 0) -> list[EpochResult]:
        """Return the results of all ranks from epoch *since* on."""
        return [result for rank in self.ranks for result in rank.progress.results if result.epoch >= since]


@contextmanager
def start_job(settings: JobSettings, nodes: Sequence[LabNode]) -> Iterator[LabJob]:
    """Start a job with a rank for each of *nodes*, in which a node may be several times. All ranks have published and
    found their files; none has read yet."""
    with ExitStack() as stack:
        job = LabJob(settings, [])
        stack.callback(_stop, job)
        for number, node in enumerate(nodes):
            job.ranks.append(LabRank(settings, node, number, len(nodes)))
        for rank in job.ranks:
            rank.publish_sequence()
        for rank in job.ranks:
            rank.wait_ready()
        yield job


def _stop(job: LabJob) -> None:
    for rank in job.ranks:
        rank.stop(kill=True)


def epoch_seconds(job: JobSettings, ranks: int) -> float:
    """Return the seconds of an epoch without waits."""
    return job.files / ranks / job.rate
