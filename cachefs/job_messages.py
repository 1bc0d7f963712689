"""Messages about sequences between jobs, cachectl and the daemon (see cachefs.messages for the rules)."""

import msgspec

from cachefs.messages import Message
from cachefs.planning.sequences.sampler import SamplerSpec


class SampleMap(Message, frozen=True):
    """Which bytes of which files each sample is."""

    # `tree`: all files in the order of their path bytes; `files`: one file per sample; `records`: a part of a file per
    # sample.
    kind: str
    # For each sample the number of its file in the snapshot: u32, little-endian.
    entries: bytes = b""
    # For each sample where it is in its file, in bytes: u64, little-endian.
    offsets: bytes = b""
    lengths: bytes = b""
    # `npy`, `tar`, `tfrecord` or `fixed:<bytes>`: how the daemon finds the records of the files.
    indexer: str = ""
    # Relative to the dataset; with the kind `files` they may stand for entries.
    paths: list[bytes] = msgspec.field(default_factory=list)


class JobPublish(Message, frozen=True):
    """One consumer of a job says how it will read."""

    job: str
    dataset: str
    # Id; empty for the current one.
    snapshot: str = ""
    # Name of the consumer, unique within the job.
    consumer: str = "0"
    # From which all epochs follow; None where each is sent (JobEpoch).
    spec: SamplerSpec | None = None
    # None: as this job has said before, else `tree`.
    map: SampleMap | None = None
    # Of the process, among the job's processes.
    rank: int = 0
    world_size: int = 1
    # Of the loader, which reads that much out of order.
    workers: int = 0
    batch_size: int = 1
    prefetch: int = 2
    # The job ends with this process; 0 for none.
    pid: int = 0
    # The job ends after so many seconds without a sign of life.
    lease: float = 60.0
    # Who publishes, as shown to users.
    source: str = ""


class JobEpoch(Message, frozen=True):
    """The order of one epoch."""

    job: str
    consumer: str
    epoch: int
    # Sample numbers: u32, little-endian.
    order: bytes


class JobProgress(Message, frozen=True):
    """A heartbeat."""

    job: str
    consumer: str
    epoch: int
    # Samples of the epoch that were delivered.
    position: int
    # The consumer ends.
    ended: bool = False


class JobName(Message, frozen=True):
    """A job."""

    job: str


class ConsumerView(Message, frozen=True):
    """A consumer of a job."""

    consumer: str
    # Where it is: *position* of *epoch_length* samples of an epoch.
    epoch: int
    position: int
    epoch_length: int
    # Epochs whose order is known.
    known_epochs: list[int]
    # Samples per second.
    rate: float
    # Reads that came where the sequence has them, and reads that did not.
    matched: int
    mismatched: int
    state: str
    problem: str = ""
    # Bytes that it has not read yet and that are on the node; and of these, what is in the page cache of some mount.
    ahead_bytes: int = 0
    pushed_bytes: int = 0


class JobView(Message, frozen=True):
    """A job."""

    job: str
    dataset: str
    snapshot: str
    # Who has published it.
    source: str
    # Unix time in seconds.
    started: float
    state: str
    consumers: list[ConsumerView]
    stalls: int = 0
    stall_seconds: float = 0.0
    fetched_bytes: int = 0
    problems: list[str] = msgspec.field(default_factory=list)


class JobList(Message, frozen=True):
    """All jobs of the node."""

    jobs: list[JobView]


class StallRow(Message, frozen=True):
    """The stalls of one consumer in one epoch, from one source."""

    # Empty where nobody has published what was read.
    job: str
    consumer: str
    epoch: int
    # As in Stall.
    source: str
    count: int
    # All stalls together, and the longest one.
    seconds: float
    longest: float


class StallRows(Message, frozen=True):
    """Stalls of one job, or of all."""

    rows: list[StallRow]
