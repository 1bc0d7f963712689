"""A node with something to see on its web page: datasets in a slow bucket, jobs that read and wait, an error.

All of it is real: a daemon, an S3 server behind a slow link, a mount, and threads that read the files of a published
order through the mount.
"""

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachefs.errors import CachefsError
from cachefs.job_messages import JobProgress, JobPublication
from cachefs.messages import DatasetView, OriginOptions, WarmupRequest
from cachefs.planning.sequences.sampler import SamplerSpec, epoch_order
from cachefs.rpc import JOB_PROGRESS, JOB_PUBLISH, WARMUP, DaemonClient
from cachefs_bench.lab.ports import free_port
from cachefs_bench.lab.slow_link import LinkLimits
from cachefs_bench.lab.throttle import run_throttle
from tests.daemon import Daemon
from tests.mounting import mounted
from tests.servers import rclone
from tests.waiting import until

# A name that is markup, for who puts names into a page as such.
MARKUP = "<script>alert(1)<_script>&<img src=x onerror=alert(1)>.jpg"
EPOCHS = 50


@dataclass(frozen=True, slots=True)
class Work:
    """What a job of the scene reads."""

    job: str
    dataset: str
    files: int
    # Samples a second that each rank reads.
    rate: float
    ranks: int = 2


@dataclass(slots=True)
class Scene:
    """The node, and those who read on it."""

    daemon: Daemon
    port: int
    mount: Path
    views: dict[str, DatasetView]
    # Outlives a restart of the daemon.
    client: DaemonClient
    stop: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def begin(self, work: Work) -> None:
        """The job publishes its ranks, and each of them begins to read."""
        specs = [
            SamplerSpec(
                kind="torch-distributed", size=work.files, seed=1, epochs=EPOCHS, replicas=work.ranks, rank=rank
            )
            for rank in range(work.ranks)
        ]
        for rank, spec in enumerate(specs):
            request = JobPublication(
                job=work.job, dataset=work.dataset, consumer=str(rank), spec=spec, rank=rank, world_size=work.ranks,
                lease=600, source="scene", heartbeats=True,
            )  # fmt: skip
            self.client.call(JOB_PUBLISH, request)
        for rank, spec in enumerate(specs):
            thread = threading.Thread(target=self._read, args=(work, str(rank), spec), daemon=True)
            thread.start()
            self.threads.append(thread)

    def _read(self, work: Work, rank: str, spec: SamplerSpec) -> None:
        said = 0.0
        for epoch in range(EPOCHS):
            for position, sample in enumerate(epoch_order(spec, epoch).tolist()):
                if self.stop.is_set():
                    return
                due = time.monotonic() + 1 / work.rate
                with contextlib.suppress(OSError):
                    (self.mount / work.dataset / f"{sample:05d}.jpg").read_bytes()
                if time.monotonic() - said > 0.2:
                    said = time.monotonic()
                    self._say(work.job, rank, epoch, position)
                time.sleep(max(0.0, due - time.monotonic()))

    def _say(self, job: str, rank: str, epoch: int, position: int, *, ended: bool = False) -> None:
        with contextlib.suppress(CachefsError):
            progress = JobProgress(job=job, consumer=rank, epoch=epoch, position=position, ended=ended)
            self.client.call(JOB_PROGRESS, progress)

    def end(self, work: Work) -> None:
        for rank in range(work.ranks):
            self._say(work.job, str(rank), EPOCHS - 1, 1, ended=True)


FILES: Mapping[str, tuple[int, int]] = {  # files of each dataset, and bytes of each file, on average
    "imagenet": (600, 48_000),
    "captions": (300, 20_000),
    "speech": (120, 60_000),
    "cold-storage": (400, 10_000),
}


def _content(name: str) -> dict[str, bytes]:
    count, size = FILES[name]
    draw = random.Random(name)
    return {f"{name}/{number:05d}.jpg": draw.randbytes(int(size * draw.uniform(0.5, 1.5))) for number in range(count)}


@contextlib.contextmanager
def scene(home: Path, sections: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[Scene]:
    """Nobody reads yet."""
    port = free_port()
    settings = {
        "web": {"listen": f"127.0.0.1:{port}"},
        "memory": {"budget": "24MiB", "segment_size": "8MiB", "min_free": 0},
        "ssd": {"budget": "96MiB", "segment_size": "16MiB", "min_free": 0},
        **(sections or {}),
    }
    buckets = home / "buckets"
    for name in FILES:
        for key, data in _content(name).items():
            path = buckets / "training-data" / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    with ExitStack() as stack:
        server = stack.enter_context(rclone.running(buckets))
        limits = LinkLimits(latency=0.03, latency_p99=0.12, bandwidth=3.2e6)
        throttle = stack.enter_context(run_throttle(server.endpoint, limits, home / "throttle.log"))
        daemon = stack.enter_context(Daemon(home / "node", settings, server.environment))
        options = OriginOptions(endpoint_url=throttle.endpoint, addressing_style="path")
        views = {name: daemon.add_dataset(name, f"s3://training-data/{name}", options) for name in FILES}
        mount = stack.enter_context(mounted(daemon.socket, "all", home / "m"))
        client = stack.enter_context(contextlib.closing(DaemonClient(daemon.socket)))
        found = Scene(daemon, port, mount, views, client)
        try:
            yield found
        finally:
            found.stop.set()
            for thread in found.threads:
                thread.join(60)


def warm(scene: Scene, dataset: str, fraction: float = 1.0) -> None:
    list(scene.daemon.client.stream_responses(WARMUP, WarmupRequest(dataset=dataset, fraction=fraction), timeout=120))


def fail(scene: Scene, home: Path) -> None:
    """An object with a name that is markup is gone from the origin, and somebody reads it."""
    origin = home / "photos"
    origin.mkdir(exist_ok=True)
    file = origin / MARKUP
    for one in file, origin / "another.jpg":
        one.write_bytes(b"here for now")
    scene.daemon.add_dataset("photos", f"file://{origin}")
    file.unlink()

    def is_reported() -> bool:
        with contextlib.suppress(OSError):
            (scene.mount / "photos" / file.name).read_bytes()
        return bool(scene.daemon.status().errors)

    until(is_reported)
