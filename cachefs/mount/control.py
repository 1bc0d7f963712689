"""`.cachefs/publish`: where a program in any language says what it is going to read, by writing lines of JSON.

It is a FIFO, since the kernel lets nobody write to a regular file of a read-only mount. The kernel moves the bytes. We
only see that a name is looked up; then we open the FIFO as any program would, and read it until all writers have closed
it. We do not keep it open, since that would keep the mount busy, so that nobody could unmount it.

Any worker of the mount may be asked for the name; worker 0 reads the FIFO for all of them.
"""

import contextlib
import logging
import os
import select
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from cachefs.errors import CachefsError, NotFound
from cachefs.inodes import ROOT
from cachefs.job_messages import JobEpoch, JobProgress, JobPublish, SampleMap
from cachefs.messages import Message
from cachefs.mount.daemon_link import DaemonLink
from cachefs.mount.namespace import Namespace
from cachefs.planning.sequences.sampler_spec import SamplerSpec
from cachefs.rpc import JOB_EPOCH, JOB_PROGRESS, JOB_PUBLISH, Method

log = logging.getLogger(__name__)

# Inode numbers, which are smaller than those of any snapshot.
DIRECTORY: Final = 2
PUBLISH: Final = 3
DIRECTORY_NAME: Final = b".cachefs"
PUBLISH_NAME: Final = b"publish"

# Seconds within which a writer that has looked the name up opens it.
IDLE_SECONDS: Final = 2.0
CALL_SECONDS: Final = 30.0
MAX_LINE: Final = 64 << 20
_PIPE: Final = 1 << 16
# Errors that decoding may raise, as anybody may write anything: besides its own errors, msgspec passes on those of text
# that is not UTF-8, of numbers that are too large, and of values nested too deep.
_NO_SENSE: Final = (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError)


class Publish(msgspec.Struct, tag_field="op", tag="publish", forbid_unknown_fields=True):
    """A consumer says what it will read. Fields without a comment mean what they mean in JobPublish."""

    job: str
    # May be left out in a mount of one dataset.
    dataset: str = ""
    consumer: str = "0"
    sampler: SamplerSpec | None = None
    # Paths relative to the dataset, one per sample; none for all files, in order of their paths.
    files: list[str] = []
    # The samples are records of the files: `npy`, `tar`, `tfrecord` or `fixed:<bytes>`.
    records: str = ""
    rank: int = 0
    world_size: int = 1
    workers: int = 0
    batch_size: int = 1
    prefetch: int = 2
    pid: int = 0
    lease: float = 60.0


class Epoch(msgspec.Struct, tag_field="op", tag="epoch", forbid_unknown_fields=True):
    """The order of one epoch."""

    job: str
    epoch: int
    # Sample numbers.
    order: list[int]
    consumer: str = "0"


class Progress(msgspec.Struct, tag_field="op", tag="progress", forbid_unknown_fields=True):
    """A heartbeat, with the fields of JobProgress."""

    job: str
    epoch: int = 0
    position: int = 0
    ended: bool = False
    consumer: str = "0"


class Control:
    """The control directory of one mount."""

    def __init__(self, mountpoint: Path, namespace: Namespace, link: DaemonLink, wanted: int) -> None:
        """wanted: an eventfd that all workers share, and set where somebody wants to write to the FIFO."""
        self._path = mountpoint / os.fsdecode(DIRECTORY_NAME) / os.fsdecode(PUBLISH_NAME)
        self._namespace = namespace
        self._link = link
        self._decode = msgspec.json.Decoder(Publish | Epoch | Progress).decode
        self._wanted = wanted

    def find(self, parent: int, name: bytes, thread: int) -> int:
        """The inode of *name* in the directory *parent*, 0 where that is not ours. A dataset's own `.cachefs` comes
        first. thread: of whoever asks.
        """
        if parent == DIRECTORY:
            if name == PUBLISH_NAME:
                if not _is_ours(thread):
                    os.eventfd_write(self._wanted, 1)
                return PUBLISH
            return {b".": DIRECTORY, b"..": ROOT}.get(name, 0)
        if parent != ROOT or name != DIRECTORY_NAME:
            return 0
        if self._namespace.single:
            snapshot, number = self._namespace.resolve(ROOT)
            if snapshot.lookup(number, name) is not None:
                return 0
        return DIRECTORY

    async def serve(self) -> None:
        """Read the FIFO as long as the mount lasts; in one of its workers."""
        while True:
            await trio.lowlevel.wait_readable(self._wanted)
            try:
                fd = await self._open()
            except OSError as error:
                log.warning("%s cannot be read: %s", self._path, error.strerror)
                await trio.sleep(IDLE_SECONDS)
                continue
            try:
                while await self._read(fd) or select.select([self._wanted], [], [], 0)[0]:
                    # Once a writer has gone, poll(2) says so for ever, and only a new descriptor waits for the next
                    # writer. The old one stays open until then: it keeps what the next writer has already written.
                    old, fd = fd, await self._open()
                    os.close(old)
            finally:
                os.close(fd)

    async def _open(self) -> int:
        def open_here() -> int:
            return os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wanted)
        return await trio.to_thread.run_sync(open_here, abandon_on_cancel=True)

    async def _read(self, fd: int) -> bool:
        """Act on what writers write until the last one has closed the FIFO; False where no writer came."""
        text = b""
        while True:
            with trio.move_on_after(IDLE_SECONDS) as waiting:
                await trio.lowlevel.wait_readable(fd)
            try:
                piece = os.read(fd, _PIPE)
            except BlockingIOError:
                continue  # a writer is there, and silent
            *lines, text = (text + piece).split(b"\n")
            for line in lines if piece else [text]:
                await self._pass_on(line)
            if not piece:
                return not waiting.cancelled_caught
            if len(text) > MAX_LINE:
                log.warning("%s: a line longer than %d bytes is ignored", self._path, MAX_LINE)
                text = b""

    async def _pass_on(self, line: bytes) -> None:
        """Tell the daemon what a line says; what it does not take is logged."""
        if not line.strip():
            return
        try:
            method, request = await trio.to_thread.run_sync(self._request, line)
            await self._link.call(method, request, CALL_SECONDS)
        except (*_NO_SENSE, CachefsError) as error:
            log.warning("%s: %s; it said %r", self._path, error, line[:200])

    def _request(self, line: bytes) -> tuple[Method[Any, Any], Message]:
        said = self._decode(line)
        if isinstance(said, Epoch):
            import numpy  # 0.1 s of the start of every mount, and few get orders

            order = numpy.array(said.order, dtype="<u4").tobytes()
            return JOB_EPOCH, JobEpoch(job=said.job, consumer=said.consumer, epoch=said.epoch, order=order)
        if isinstance(said, Progress):
            return JOB_PROGRESS, JobProgress(**{name: getattr(said, name) for name in said.__struct_fields__})
        return JOB_PUBLISH, self._publication(said)

    def _publication(self, said: Publish) -> JobPublish:
        names = {os.fsdecode(name): snapshot for name, _, snapshot in self._namespace.datasets()}
        dataset = said.dataset or (next(iter(names)) if len(names) == 1 else "")
        if dataset not in names:
            raise NotFound(f"this mount has no dataset {dataset!r}; name one of {', '.join(names)}")
        paths = [os.fsencode(path) for path in said.files]
        kind = "records" if said.records else "files" if paths else "tree"
        return JobPublish(
            job=said.job,
            dataset=dataset,
            snapshot=names[dataset].id,
            consumer=said.consumer,
            spec=said.sampler,
            map=SampleMap(kind=kind, paths=paths, indexer=said.records),
            rank=said.rank,
            world_size=said.world_size,
            workers=said.workers,
            batch_size=said.batch_size,
            prefetch=said.prefetch,
            pid=said.pid,
            lease=said.lease,
            source="control file",
        )


def _is_ours(thread: int) -> bool:
    """Is it a thread of a worker of this mount, so a child of the supervisor whose child we are?"""
    try:
        status = Path(f"/proc/{thread}/status").read_bytes()
    except OSError:
        return False
    return f"\nPPid:\t{os.getppid()}\n".encode() in status
