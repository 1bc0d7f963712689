"""Decodes lines of the control file into calls to the daemon."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec

from cachefs.control_calls import METHODS, Call, Part
from cachefs.errors import CachefsError, ConfigError, NotFound
from cachefs.job_messages import MAX_CONSUMER_NAME, MAX_JOB_NAME, JobEpoch, JobProgress, JobPublish, SampleMap
from cachefs.messages import Message
from cachefs.planning.sequences.sampler_spec import SamplerSpec
from cachefs.rpc import JOB_EPOCH, JOB_PROGRESS, JOB_PUBLISH, Method, encode

# The source that the daemon shows for a job published through the control file.
SOURCE: Final = "control file"
# Errors that decoding untrusted lines may raise: besides its own errors, msgspec passes on those of text that is not
# UTF-8, of numbers that are too large, and of values nested too deep.
_NO_SENSE: Final = (msgspec.MsgspecError, UnicodeError, OverflowError, RecursionError)

# The daemon would refuse longer names too, but only after a wait in the queue.
_JobName = Annotated[str, msgspec.Meta(max_length=MAX_JOB_NAME)]
_ConsumerName = Annotated[str, msgspec.Meta(max_length=MAX_CONSUMER_NAME)]


class Publish(msgspec.Struct, tag_field="op", tag="publish", forbid_unknown_fields=True):
    """A consumer's publication. Fields without a comment mean the same as in JobPublish."""

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


class Epoch(msgspec.Struct, tag_field="op", tag="epoch", forbid_unknown_fields=True):
    """The order of one epoch."""

    job: _JobName
    epoch: int
    # Sample numbers.
    order: list[int]
    consumer: _ConsumerName = "0"


class Progress(msgspec.Struct, tag_field="op", tag="progress", forbid_unknown_fields=True):
    """A heartbeat, with the fields of JobProgress."""

    job: _JobName
    epoch: int = 0
    position: int = 0
    ended: bool = False
    consumer: _ConsumerName = "0"


Line = Publish | Epoch | Progress | Part | Call
_decode: Final = msgspec.json.Decoder(Line).decode


@dataclass(frozen=True, slots=True)
class Said:
    """The call to the daemon that a line stands for."""

    job: str
    consumer: str
    method: Method[Any, Any]
    request: Message
    # The call that waits for an answer; None where the line asks for none.
    call: Call | None = None


def read(line: bytes) -> Line:
    """Decode a line. Raises ConfigError with the reason where that fails."""
    try:
        said: Line = _decode(line)
    except _NO_SENSE as error:
        raise ConfigError(str(error)) from None
    return said


def understand(said: Publish | Epoch | Progress, datasets: Mapping[str, str]) -> Said:
    """Translate a line into a call. datasets: name -> id of the snapshot shown. Raises CachefsError with the reason."""
    try:
        method, request = _call(said, datasets)
        encode(request)
    except CachefsError:
        raise
    except _NO_SENSE as error:
        raise ConfigError(str(error)) from None
    return Said(said.job, said.consumer, method, request)


def understand_call(call: Call, encoded: bytes, datasets: Mapping[str, str], user: int | None = None) -> Said:
    """Translate a call of cachefs.control_calls; only its names, dataset and snapshot are checked here.

    encoded: the request; user: the sender according to the kernel, None where unknown. Raises CachefsError with the
    reason.
    """
    method = METHODS.get(call.method)
    if method is None:
        raise ConfigError(f"no call {call.method!r:.80} goes through the control file")
    try:
        request = msgspec.msgpack.decode(encoded, type=method.request)
    except _NO_SENSE as error:
        raise ConfigError(str(error)) from None
    consumer = getattr(request, "consumer", "")
    if len(request.job) > MAX_JOB_NAME or len(consumer) > MAX_CONSUMER_NAME:
        raise ConfigError(f"names have at most {MAX_JOB_NAME} and {MAX_CONSUMER_NAME} characters")
    if isinstance(request, JobPublish):
        if datasets.get(request.dataset) != request.snapshot:
            raise NotFound(f"this mount does not show dataset {request.dataset!r:.80} at {request.snapshot!r:.80}")
        source = f"{SOURCE}: {request.source}"[:MAX_CONSUMER_NAME]
        request = msgspec.structs.replace(request, source=source, sent_by=user)
    encode(request)
    return Said(request.job, consumer, method, request, call)


def _call(said: Publish | Epoch | Progress, datasets: Mapping[str, str]) -> tuple[Method[Any, Any], Message]:
    if isinstance(said, Epoch):
        import numpy  # would take 0.1 s of the start of every mount, and few mounts get orders

        order = numpy.array(said.order, dtype="<u4").tobytes()
        return JOB_EPOCH, JobEpoch(job=said.job, consumer=said.consumer, epoch=said.epoch, order=order)
    if isinstance(said, Progress):
        return JOB_PROGRESS, JobProgress(**{name: getattr(said, name) for name in said.__struct_fields__})
    return JOB_PUBLISH, _publication(said, datasets)


def _publication(said: Publish, datasets: Mapping[str, str]) -> JobPublish:
    dataset = said.dataset or (next(iter(datasets)) if len(datasets) == 1 else "")
    if dataset not in datasets:
        raise NotFound(f"this mount has no dataset {dataset!r}; name one of {', '.join(datasets)}")
    paths = [os.fsencode(path) for path in said.files]
    kind = "records" if said.records else "files" if paths else "tree"
    return JobPublish(
        job=said.job,
        dataset=dataset,
        snapshot=datasets[dataset],
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
        source=SOURCE,
    )
