"""Decodes lines of the control file into calls to the daemon, and collects requests that come in parts until they are
complete. Any user may write these lines.

A pipe does not tell who wrote a line, but a line names a token, and the kernel knows which user the token belongs to
(cachefs.mount.control.control_directory). A token has room for a few requests. When all room is taken, the user who has
most of it loses the request that has waited longest for its next part. Users therefore cannot take each other's room:
with as many requests as there is room for, each user keeps an equal share. All tokens without a user together have the
share of one user.
"""

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec

from cachefs.control_calls import MAX_REQUEST_BYTES, METHODS, VERSION, RequestEnd, RequestPart
from cachefs.errors import Busy, CachefsError, ConfigError, NotFound
from cachefs.job_messages import MAX_CONSUMER_NAME, MAX_JOB_NAME, JobEpoch, JobProgress, JobPublication, SampleMap
from cachefs.largest_user import find_largest_user
from cachefs.messages import Message
from cachefs.planning.sequences.sampler_spec import SamplerSpec
from cachefs.rpc import JOB_EPOCH, JOB_PROGRESS, JOB_PUBLISH, Method, encode

# The source that the daemon shows for a job published through the control file.
SOURCE: Final = "control file"
# Errors that decoding untrusted lines may raise: besides its own errors, msgspec passes on those of text that is not
# UTF-8, of numbers that are too large, and of values nested too deep.
_DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeError, OverflowError, RecursionError)

# The daemon would refuse longer names too, but only after a wait in the queue.
_JobName = Annotated[str, msgspec.Meta(max_length=MAX_JOB_NAME)]
_ConsumerName = Annotated[str, msgspec.Meta(max_length=MAX_CONSUMER_NAME)]
# Most incomplete requests of one caller, and of all callers; and the bytes of all.
MAX_OF_CALLER: Final = 4
MAX_INCOMPLETE: Final = 256
MAX_BYTES: Final = 128 << 20
# Seconds without a further part after which a request is dropped.
PART_SECONDS: Final = 30.0


class PublishLine(msgspec.Struct, tag_field="op", tag="publish", forbid_unknown_fields=True):
    """A consumer's publication. Fields without a comment mean the same as in JobPublication."""

    job: _JobName
    # May be left out in a mount of one dataset.
    dataset: str = ""
    consumer: _ConsumerName = "0"
    sampler: SamplerSpec | None = None
    # Paths relative to the dataset, one per sample; empty: all files, in order of their paths.
    files: list[str] = []
    # Format of the records that are the samples: `npy`, `tar`, `tfrecord` or `fixed:<bytes>`.
    records: str = ""
    rank: int = 0
    world_size: int = 1
    workers: int = 0
    batch_size: int = 1
    prefetch: int = 2
    pid: int = 0
    lease: float = 60.0


class EpochLine(msgspec.Struct, tag_field="op", tag="epoch", forbid_unknown_fields=True):
    """The order of one epoch."""

    job: _JobName
    epoch: int
    # Sample numbers.
    order: list[int]
    consumer: _ConsumerName = "0"


class ProgressLine(msgspec.Struct, tag_field="op", tag="progress", forbid_unknown_fields=True):
    """A heartbeat, with the fields of JobProgress."""

    job: _JobName
    epoch: int = 0
    position: int = 0
    ended: bool = False
    consumer: _ConsumerName = "0"


ControlLine = PublishLine | EpochLine | ProgressLine | RequestPart | RequestEnd
_decode: Final = msgspec.json.Decoder(ControlLine).decode


@dataclass(frozen=True, slots=True)
class ControlCall:
    """The call to the daemon that a line stands for."""

    job: str
    consumer: str
    method: Method[Any, Any]
    request: Message
    # The call that waits for an answer; None where the line asks for none.
    call: RequestEnd | None = None


def decode_line(line: bytes) -> ControlLine:
    """Decode a line. Raises ConfigError with the reason where that fails."""
    try:
        decoded: ControlLine = _decode(line)
    except _DECODE_ERRORS as error:
        raise ConfigError(str(error)) from None
    return decoded


def translate_line(line: PublishLine | EpochLine | ProgressLine, datasets: Mapping[str, str]) -> ControlCall:
    """Translate a line into a call. datasets: name -> id of the snapshot shown. Raises CachefsError with the reason."""
    try:
        method, request = _daemon_request(line, datasets)
        encode(request)
    except CachefsError:
        raise
    except _DECODE_ERRORS as error:
        raise ConfigError(str(error)) from None
    return ControlCall(line.job, line.consumer, method, request)


def translate_call(
    call: RequestEnd, encoded: bytes, datasets: Mapping[str, str], user: int | None = None
) -> ControlCall:
    """Translate a call of cachefs.control_calls; only its names, dataset and snapshot are checked here.

    encoded: the request; user: the sender according to the kernel, None where unknown. Raises CachefsError with the
    reason.
    """
    method = METHODS.get(call.method)
    if method is None:
        raise ConfigError(f"no call {call.method!r:.80} goes through the control file")
    try:
        request = msgspec.msgpack.decode(encoded, type=method.request)
    except _DECODE_ERRORS as error:
        raise ConfigError(str(error)) from None
    consumer = getattr(request, "consumer", "")
    if len(request.job) > MAX_JOB_NAME or len(consumer) > MAX_CONSUMER_NAME:
        raise ConfigError(f"names have at most {MAX_JOB_NAME} and {MAX_CONSUMER_NAME} characters")
    if isinstance(request, JobPublication):
        if datasets.get(request.dataset) != request.snapshot:
            raise NotFound(f"this mount does not show dataset {request.dataset!r:.80} at {request.snapshot!r:.80}")
        source = f"{SOURCE}: {request.source}"[:MAX_CONSUMER_NAME]
        request = msgspec.structs.replace(request, source=source, sent_by=user)
    encode(request)
    return ControlCall(request.job, consumer, method, request, call)


def _daemon_request(
    line: PublishLine | EpochLine | ProgressLine, datasets: Mapping[str, str]
) -> tuple[Method[Any, Any], Message]:
    if isinstance(line, EpochLine):
        import numpy  # would take 0.1 s of the start of every mount, and few mounts get orders

        order = numpy.array(line.order, dtype="<u4").tobytes()
        return JOB_EPOCH, JobEpoch(job=line.job, consumer=line.consumer, epoch=line.epoch, order=order)
    if isinstance(line, ProgressLine):
        return JOB_PROGRESS, JobProgress(**{name: getattr(line, name) for name in line.__struct_fields__})
    return JOB_PUBLISH, _publish_request(line, datasets)


def _publish_request(line: PublishLine, datasets: Mapping[str, str]) -> JobPublication:
    dataset = line.dataset or (next(iter(datasets)) if len(datasets) == 1 else "")
    if dataset not in datasets:
        raise NotFound(f"this mount has no dataset {dataset!r}; name one of {', '.join(datasets)}")
    paths = [os.fsencode(path) for path in line.files]
    kind = "records" if line.records else "files" if paths else "tree"
    return JobPublication(
        job=line.job,
        dataset=dataset,
        snapshot=datasets[dataset],
        consumer=line.consumer,
        spec=line.sampler,
        map=SampleMap(kind=kind, paths=paths, indexer=line.records),
        rank=line.rank,
        world_size=line.world_size,
        workers=line.workers,
        batch_size=line.batch_size,
        prefetch=line.prefetch,
        pid=line.pid,
        lease=line.lease,
        source=SOURCE,
    )


@dataclass(slots=True)
class _IncompleteRequest:
    # None where no user has looked the token up.
    user: int | None = None
    data: bytearray = field(default_factory=bytearray)
    # Time of the last part.
    latest: float = 0.0


class IncompleteRequests:
    """The incomplete requests. *now* is seconds of a monotonic clock."""

    def __init__(self) -> None:
        # (token, call number) -> the parts so far. The request that has waited longest for a part comes first.
        self._incomplete: dict[tuple[str, int], _IncompleteRequest] = {}
        self._bytes = 0

    def add_part(self, part: RequestPart, now: float, user: int | None = None) -> None:
        """Append a part. Raises Busy where the part does not follow the last one or its *user* exceeds a fair share of
        the room, and ConfigError where the request is too large."""
        self._drop_old(now)
        key = part.answers, part.id
        begun = _IncompleteRequest(user) if part.at == 0 else self._incomplete.get(key)
        if begun is None or part.at != len(begun.data):
            self._drop(key)
            raise Busy(f"a part at {part.at} does not follow the bytes received so far; the call is dropped")
        if len(begun.data) + len(part.data) > MAX_REQUEST_BYTES:
            self._drop(key)
            raise ConfigError(f"a call of more than {MAX_REQUEST_BYTES >> 20} MiB; use the daemon's socket")
        self._drop(key)
        self._make_room(part.answers, begun.user, len(begun.data) + len(part.data))
        begun.data += part.data
        begun.latest = now
        self._incomplete[key] = begun
        self._bytes += len(begun.data)

    def complete_request(self, call: RequestEnd, now: float) -> bytes:
        """Return all bytes of the request. Raises Busy where some are missing, and ConfigError where the bytes do not
        match the call or the mount is too old for it."""
        self._drop_old(now)
        begun = self._drop((call.answers, call.id))
        request = bytes(begun.data) + call.data if begun is not None else call.data
        if call.version > VERSION:
            raise ConfigError(
                f"a call of version {call.version}; this mount knows {VERSION}. Mount with a newer cachefs"
            )
        if len(request) < call.size:
            raise Busy(
                f"the mount has kept {len(request)} of the {call.size} bytes of a call: too many calls came at "
                "once, or its lines came too slowly; try again"
            )
        if len(request) != call.size or zlib.crc32(request) != call.crc:
            raise ConfigError(f"a call announced {call.size} bytes; {len(request)} arrived, or their checksum differs")
        return request

    def _make_room(self, caller: str, user: int | None, size: int) -> None:
        """Drop requests until *size* more bytes and one more request fit. Raises Busy where *user* has most of the room
        and no other request to drop."""
        own = [key for key in self._incomplete if key[0] == caller]
        for key in own[: max(0, len(own) + 1 - MAX_OF_CALLER)]:
            self._drop(key)
        while len(self._incomplete) >= MAX_INCOMPLETE:
            self._drop_oldest_of(find_largest_user(((begun.user, 1) for begun in self._incomplete.values()), user, 1))
        while self._bytes + size > MAX_BYTES:
            self._drop_oldest_of(
                find_largest_user(((begun.user, len(begun.data)) for begun in self._incomplete.values()), user, size)
            )

    def _drop_oldest_of(self, user: int | None) -> None:
        """Drop the request of *user* that has waited longest. Raises Busy where the user has none."""
        key = next((key for key, begun in self._incomplete.items() if begun.user == user), None)
        if key is None:
            raise Busy("too many calls are on their way through the mount at once; try again")
        self._drop(key)

    def _drop_old(self, now: float) -> None:
        for key in [key for key, begun in self._incomplete.items() if now - begun.latest > PART_SECONDS]:
            self._drop(key)

    def _drop(self, key: tuple[str, int]) -> _IncompleteRequest | None:
        begun = self._incomplete.pop(key, None)
        if begun is not None:
            self._bytes -= len(begun.data)
        return begun
