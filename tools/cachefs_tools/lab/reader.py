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
from cachefs_tools.sample_data import is_sample, sample_name

# Seconds. Longer reads have waited for something outside this node's memory.
SLOW: Final = 0.01
# Seconds. Longer reads are reported one by one.
LONG: Final = 0.5
# Seconds of delay that a reader catches up on.
_BEHIND: Final = 1.0
_SAY_EVERY: Final = 1.0
# Kinds of torch scripts: sets its sampler's epoch, does not (so all epochs are equal), or has a validation loader after
# each epoch.
Script = Literal["set-epoch", "no-set-epoch", "validation"]


@dataclass(frozen=True, slots=True)
class Trouble:
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
    slow: int = 0  # reads that took longer than SLOW
    p50: float = 0.0
    p99: float = 0.0
    longest: float = 0.0
    _seconds: list[float] = field(default_factory=list)

    def add(self, seconds: float, size: int) -> None:
        self.reads += 1
        self.bytes += size
        self.slow += seconds > SLOW
        self._seconds.append(seconds)

    def as_line(self) -> dict[str, float]:
        """Return the totals, without the single reads."""
        if len(self._seconds) > 1:
            quantiles = statistics.quantiles(self._seconds, n=100)
            self.p50, self.p99, self.longest = quantiles[49], quantiles[98], max(self._seconds)
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}


class Reader:
    """Reads with several threads, which take samples in the order of the epoch."""

    def __init__(self, root: str, spec: SamplerSpec, rate: float, threads: int) -> None:
        self._root, self._spec, self._rate, self._threads = root, spec, rate, threads
        self._lock = threading.Lock()
        self._due = 0.0
        self._said = 0.0
        self._over = threading.Event()  # set when the parent has gone

    def read(self, epoch: int) -> None:
        """Read an epoch, and report the results."""
        order = deque(epoch_order(self._spec, epoch).tolist())
        result = EpochResult(epoch, time.monotonic())
        self._due = max(self._due, result.begin - _BEHIND)
        threads = [threading.Thread(target=self._work, args=(order, result)) for _ in range(self._threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        result.end = time.monotonic()
        self.say({"epoch": result.as_line()})

    def _work(self, order: "deque[int]", result: EpochResult) -> None:
        while not self._over.is_set():
            with self._lock:
                if not order:
                    return
                sample = order.popleft()
                now = time.monotonic()
                self._due = max(self._due + 1 / self._rate, now - _BEHIND)
                due = self._due
                if now - self._said > _SAY_EVERY:
                    self._said = now
                    self.say({"at": [result.epoch, result.reads]})
            time.sleep(max(0.0, due - now))
            self._read_one(sample, result)

    def _read_one(self, sample: int, result: EpochResult) -> None:
        begin = time.monotonic()
        trouble = None
        size = 0
        try:
            data = content(f"{self._root}/{sample_name(sample)}")
            seconds, size = time.monotonic() - begin, len(data)
            if not is_sample(data, sample):
                trouble = Trouble("wrong", begin, seconds, sample)
            elif seconds > LONG:
                trouble = Trouble("long", begin, seconds, sample)
        except OSError as error:
            seconds = time.monotonic() - begin
            trouble = Trouble("error", begin, seconds, sample, error.strerror or "")
        with self._lock:
            result.add(seconds, size)
            if trouble is not None:
                result.errors += trouble.kind == "error"
                result.wrong += trouble.kind == "wrong"
                self.say({"trouble": asdict(trouble)})

    def say(self, line: object) -> None:
        """Report a line to the parent; note if it has gone."""
        try:
            say(line)
        except BrokenPipeError:
            self._over.set()


def say(line: object) -> None:
    """Write a whole line, which a pipe takes at once. Raises BrokenPipeError."""
    os.write(sys.stdout.fileno(), json.dumps(line).encode() + b"\n")


def content(path: str) -> bytes:
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


def epochs_asked_for(first: int, epochs: int) -> Iterator[int]:
    """Yield the epochs that standard input asks for."""
    going_on = False
    for epoch in range(first, epochs):
        if not going_on:
            line = sys.stdin.readline()
            if not line:
                return
            going_on = line.strip() == "on"
        yield epoch


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the arguments shared by all readers of the lab."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    for name in ("files", "epochs", "rank", "replicas", "seed", "threads", "first"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    return parser


def main() -> None:
    given = arguments().parse_args()
    spec = SamplerSpec(
        kind="torch-distributed", size=given.files, seed=given.seed, epochs=given.epochs, replicas=given.replicas,
        rank=given.rank,
    )  # fmt: skip
    reader = Reader(given.root, spec, given.rate, given.threads)
    os.listdir(given.root)
    reader.say({"ready": True})
    for epoch in epochs_asked_for(given.first, given.epochs):
        reader.read(epoch)


if __name__ == "__main__":
    main()
