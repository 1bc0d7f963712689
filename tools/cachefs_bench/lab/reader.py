"""One rank of a job: reads its samples through a mount at a fixed rate, checks each byte, and reports the results.

The order is that of torch's DistributedSampler. Pages that were read are dropped, so the next read of the sample
reaches the mount. Before an epoch it waits for a line on its standard input: `go` begins one, `on` all remaining ones,
and the end of the input ends the reader. It writes JSON lines: an `epoch` as it ends, troubles as they happen, and its
position about once a second. Times are seconds of CLOCK_MONOTONIC.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Final, Literal

from cachefs.planning.sequences.sampler import epoch_order
from cachefs.planning.sequences.sampler_spec import SamplerSpec
from cachefs_bench.sample_data import is_sample, sample_name

# Seconds. Longer reads have waited for something outside this node's memory.
SLOW_SECONDS: Final = 0.01
# Seconds. Longer reads are reported one by one.
LONG_SECONDS: Final = 0.5
# Seconds of delay that a reader catches up on.
_MAX_DELAY: Final = 1.0
_REPORT_SECONDS: Final = 1.0
# Kinds of torch scripts: sets its sampler's epoch, does not (so all epochs are equal), or has a validation loader after
# each epoch.
ScriptKind = Literal["set-epoch", "no-set-epoch", "validation"]


@dataclass(frozen=True, slots=True)
class ReadProblem:
    """A slow, failed or wrong read."""

    kind: str  # long, error, wrong
    when: float  # begin of the read
    seconds: float
    sample: int
    reason: str = ""


@dataclass(slots=True)
class EpochResult:
    """The results of an epoch."""

    epoch: int
    begin: float
    end: float = 0.0
    reads: int = 0
    bytes: int = 0
    errors: int = 0
    wrong: int = 0
    slow: int = 0  # reads that took longer than SLOW_SECONDS
    p50: float = 0.0
    p99: float = 0.0
    longest: float = 0.0
    _seconds: list[float] = field(default_factory=list)

    def add_read(self, seconds: float, size: int) -> None:
        self.reads += 1
        self.bytes += size
        self.slow += seconds > SLOW_SECONDS
        self._seconds.append(seconds)

    def as_line(self) -> dict[str, float]:
        """Return the totals, without the single reads."""
        if len(self._seconds) > 1:
            quantiles = statistics.quantiles(self._seconds, n=100)
            self.p50, self.p99, self.longest = quantiles[49], quantiles[98], max(self._seconds)
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}


class RankReader:
    """Reads with several threads, which take samples in the order of the epoch."""

    def __init__(self, root: str, spec: SamplerSpec, rate: float, threads: int, begin: int = 0) -> None:
        """begin: number of the file that is sample 0."""
        self._root, self._spec, self._rate, self._threads, self._begin = root, spec, rate, threads, begin
        self._lock = threading.Lock()
        self._due = 0.0
        self._reported_at = 0.0
        self._parent_gone = threading.Event()  # set when the parent has gone

    def read_epoch(self, epoch: int) -> None:
        """Read an epoch, and report the results."""
        order = deque(epoch_order(self._spec, epoch).tolist())
        result = EpochResult(epoch, time.monotonic())
        self._due = max(self._due, result.begin - _MAX_DELAY)
        threads = [threading.Thread(target=self._work, args=(order, result)) for _ in range(self._threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        result.end = time.monotonic()
        self.report_line({"epoch": result.as_line()})

    def _work(self, order: "deque[int]", result: EpochResult) -> None:
        while not self._parent_gone.is_set():
            with self._lock:
                if not order:
                    return
                sample = self._begin + order.popleft()
                now = time.monotonic()
                self._due = max(self._due + 1 / self._rate, now - _MAX_DELAY)
                due = self._due
                if now - self._reported_at > _REPORT_SECONDS:
                    self._reported_at = now
                    self.report_line({"at": [result.epoch, result.reads, now]})
            time.sleep(max(0.0, due - now))
            self._read_one(sample, result)

    def _read_one(self, sample: int, result: EpochResult) -> None:
        begin = time.monotonic()
        trouble = None
        size = 0
        try:
            data = read_and_drop(f"{self._root}/{sample_name(sample)}")
            seconds, size = time.monotonic() - begin, len(data)
            if not is_sample(data, sample):
                trouble = ReadProblem("wrong", begin, seconds, sample)
            elif seconds > LONG_SECONDS:
                trouble = ReadProblem("long", begin, seconds, sample)
        except OSError as error:
            seconds = time.monotonic() - begin
            trouble = ReadProblem("error", begin, seconds, sample, error.strerror or "")
        with self._lock:
            result.add_read(seconds, size)
            if trouble is not None:
                result.errors += trouble.kind == "error"
                result.wrong += trouble.kind == "wrong"
                self.report_line({"trouble": asdict(trouble)})

    def report_line(self, line: object) -> None:
        """Report a line to the parent; note if it has gone."""
        try:
            write_line(line)
        except BrokenPipeError:
            self._parent_gone.set()


def write_line(line: object) -> None:
    """Write a whole line, which a pipe takes at once. Raises BrokenPipeError."""
    os.write(sys.stdout.fileno(), json.dumps(line).encode() + b"\n")


def read_and_drop(path: str) -> bytes:
    """Return a file's bytes, and drop its pages."""
    file = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        data = os.read(file, size)
        while len(data) < size:
            more = os.read(file, size - len(data))
            if not more:
                break
            data += more
        with suppress(OSError):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return data
    finally:
        os.close(file)


def requested_epochs(first: int, epochs: int) -> Iterator[int]:
    """Yield the epochs that standard input asks for."""
    going_on = False
    for epoch in range(first, epochs):
        if not going_on:
            line = sys.stdin.readline()
            if not line:
                return
            going_on = line.strip() == "on"
        yield epoch


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments shared by all readers of the lab."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    for name in ("files", "epochs", "rank", "replicas", "seed", "threads", "first"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--begin", type=int, default=0)
    return parser


def main() -> None:
    args = argument_parser().parse_args()
    spec = SamplerSpec(
        kind="torch-distributed", size=args.files, seed=args.seed, epochs=args.epochs, replicas=args.replicas,
        rank=args.rank,
    )  # fmt: skip
    reader = RankReader(args.root, spec, args.rate, args.threads, args.begin)
    os.listdir(args.root)
    reader.report_line({"ready": True})
    for epoch in requested_epochs(args.first, args.epochs):
        reader.read_epoch(epoch)


if __name__ == "__main__":
    main()
