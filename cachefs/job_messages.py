"""What jobs, cachectl and the daemon say to each other about sequences (see cachefs.messages for the rules)."""

import msgspec

from cachefs.messages import Message
from cachefs.planning.sequences.sampler import SamplerSpec


class SampleMap(Message, frozen=True):
    """Which bytes of which files each sample is.

    kind: `tree`, all files in order of their path bytes; `files`, one file per sample; `records`, a part of a file per
    sample. entries: u32 little-endian snapshot entry number per sample; offsets, lengths: u64 little-endian per sample.
    indexer: `npy`, `tar`, `tfrecord` or `fixed:<bytes>`, with which the daemon finds the records of the files in
    *entries* or *paths*. paths: relative to the dataset; with kind `files` they may stand for entries.
    """

    kind: str
    entries: bytes = b""
    offsets: bytes = b""
    lengths: bytes = b""
    indexer: str = ""
    paths: list[bytes] = msgspec.field(default_factory=list)


class JobPublish(Message, frozen=True):
    """One consumer of a job says how it will read. consumer: unique within the job; map: None means as this job said
    before, else `tree`; workers, batch_size, prefetch: of the loader, which reads that much out of order; pid: the job
    ends with it (0: none); lease: seconds without any sign of life after which it ends."""

    job: str
    dataset: str
    snapshot: str = ""
    consumer: str = "0"
    spec: SamplerSpec | None = None
    map: SampleMap | None = None
    rank: int = 0
    world_size: int = 1
    workers: int = 0
    batch_size: int = 1
    prefetch: int = 2
    pid: int = 0
    lease: float = 60.0
    source: str = ""


class JobEpoch(Message, frozen=True):
    """The order of one epoch. order: u32 little-endian sample numbers."""

    job: str
    consumer: str
    epoch: int
    order: bytes


class JobProgress(Message, frozen=True):
    """A heartbeat. position: samples of the epoch that are delivered; ended: the consumer is through."""

    job: str
    consumer: str
    epoch: int
    position: int
    ended: bool = False


class JobName(Message, frozen=True):
    job: str


class ConsumerView(Message, frozen=True):
    """position of epoch_length samples of an epoch; rate: samples/s; matched, mismatched: reads that were, and were
    not, where the sequence had them; ahead_bytes: on the node and not read yet; pushed_bytes: of these, what is in the
    page cache of some mount."""

    consumer: str
    epoch: int
    position: int
    epoch_length: int
    known_epochs: list[int]
    rate: float
    matched: int
    mismatched: int
    state: str
    problem: str = ""
    ahead_bytes: int = 0
    pushed_bytes: int = 0


class JobView(Message, frozen=True):
    """started: unix seconds; source: who published it."""

    job: str
    dataset: str
    snapshot: str
    source: str
    started: float
    state: str
    consumers: list[ConsumerView]
    stalls: int = 0
    stall_seconds: float = 0.0
    fetched_bytes: int = 0
    problems: list[str] = msgspec.field(default_factory=list)


class JobList(Message, frozen=True):
    jobs: list[JobView]


class StallRow(Message, frozen=True):
    """Stalls of one consumer in one epoch from one source; longest in seconds. job is empty where nobody published."""

    job: str
    consumer: str
    epoch: int
    source: str
    count: int
    seconds: float
    longest: float


class StallRows(Message, frozen=True):
    rows: list[StallRow]
