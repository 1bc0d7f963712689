"""Decodes lines of the control file into calls to the daemon."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec

from cachefs.control_calls import METHODS, RequestEnd, RequestPart
from cachefs.errors import CachefsError, ConfigError, NotFound
from cachefs.job_messages import MAX_CONSUMER_NAME, MAX_JOB_NAME, JobEpoch, JobProgress, JobPublication, SampleMap
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
        said: ControlLine = _decode(line)
    except _DECODE_ERRORS as error:
        raise ConfigError(str(error)) from None
    return said


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
