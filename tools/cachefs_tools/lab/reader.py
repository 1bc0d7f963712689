"""One rank of a job: reads its samples through a mount at a fixed rate, checks each byte, and says what came of it.

The order is that of torch's DistributedSampler. What was read is dropped from the page cache, so the next read of it
reaches the mount. It waits for a line on its standard input before an epoch: `go` begins one, `on` all that are left,
and the end of the input ends it. It writes JSON lines: an `epoch` as it ends, what went wrong as it happens, and about
once a second how far it is. Times are seconds of CLOCK_MONOTONIC.
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

# Seconds. Reads that take longer have waited for something that is not in the memory of this node.
SLOW: Final = 0.01
# Seconds. Reads that take longer are named one by one.
LONG: Final = 0.5
# Seconds that a reader which was held up makes up for.
_BEHIND: Final = 1.0
_SAY_EVERY: Final = 1.0
# What a script that trains with torch does: it sets the epoch of its sampler, does not (so that each epoch is the same
# as the first one), or also has a loader for a validation after each epoch.
Script = Literal["set-epoch", "no-set-epoch", "validation"]


@dataclass(frozen=True, slots=True)
class Trouble:
    """A read that took long, failed, or was wrong."""

    kind: str  # long, error, wrong
    when: float  # it began
    seconds: float
    sample: int
    reason: str = ""


@dataclass(slots=True)
class EpochResult:
    """What came of an epoch."""

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
        """Without the single reads."""
        if len(self._seconds) > 1:
            quantiles = statistics.quantiles(self._seconds, n=100)
            self.p50, self.p99, self.longest = quantiles[49], quantiles[98], max(self._seconds)
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}


class Reader:
    """Reads with some threads, which take turns in the order of the epoch."""

    def __init__(self, root: str, spec: SamplerSpec, rate: float, threads: int) -> None:
        self._root, self._spec, self._rate, self._threads = root, spec, rate, threads
        self._lock = threading.Lock()
        self._due = 0.0
        self._said = 0.0
        self._over = threading.Event()  # nobody listens any more

    def read(self, epoch: int) -> None:
        """Read an epoch, and say what came of it."""
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
        """Tell who started this, if anybody listens."""
        try:
            say(line)
        except BrokenPipeError:
            self._over.set()


def say(line: object) -> None:
    """Tell who started this. Whole lines: a pipe takes that many bytes at once. Raises BrokenPipeError."""
    os.write(sys.stdout.fileno(), json.dumps(line).encode() + b"\n")


def content(path: str) -> bytes:
    """All bytes of the file, which are not left in the page cache."""
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
    """Those that the lines on standard input ask for."""
    going_on = False
    for epoch in range(first, epochs):
        if not going_on:
            line = sys.stdin.readline()
            if not line:
                return
            going_on = line.strip() == "on"
        yield epoch


def arguments() -> argparse.ArgumentParser:
    """What every reader of the lab is told."""
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
