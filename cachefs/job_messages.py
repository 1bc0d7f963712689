"""Messages between jobs, cachectl and the daemon about sequences (see cachefs.messages for the rules)."""

from typing import Final

import msgspec

from cachefs.messages import Message, ReadaheadCounts, Trouble
from cachefs.planning.sequences.sampler_spec import SamplerSpec

# Maximum lengths of names in characters.
MAX_JOB_NAME: Final = 128
MAX_CONSUMER_NAME: Final = 256
MAX_NOTE: Final = 1000


class SampleMap(Message, frozen=True):
    """The files, or parts of files, that samples are."""

    # `tree`: all files, in order of their path bytes; `files`: one file per sample; `records`: a part of a file per
    # sample.
    kind: str
    # Snapshot entry number per sample, u32 little-endian.
    entries: bytes = b""
    # First byte and number of bytes per sample, u64 little-endian.
    offsets: bytes = b""
    lengths: bytes = b""
    # `npy`, `tar`, `tfrecord` or `fixed:<bytes>`: the daemon finds the records of the files in *entries* or *paths*.
    indexer: str = ""
    # Paths of files, relative to the dataset. With kind `files` they may stand for *entries*.
    paths: list[bytes] = msgspec.field(default_factory=list)


class JobPublication(Message, frozen=True):
    """Publishes how one consumer of a job will read."""

    job: str
    dataset: str
    snapshot: str = ""  # the first digits of its id; "" for the dataset's current one
    consumer: str = "0"  # unique within the job
    spec: SamplerSpec | None = None
    map: SampleMap | None = None  # None: as this job published before, else `tree`
    rank: int = 0
    world_size: int = 1
    # The next three tell how far out of order the consumer's loader reads.
    workers: int = 0  # of the loader
    batch_size: int = 1  # samples
    prefetch: int = 2  # batches that each worker reads ahead
    pid: int = 0  # the job ends with this process (0: none)
    # The pid namespace of *pid*: the inode number of its /proc/self/ns/pid; 0 for the daemon's.
    pid_namespace: int = 0
    lease: float = 60.0  # seconds without a heartbeat after which the job ends
    source: str = ""  # name of the publisher
    # The publisher sends heartbeats, more often than its lease. Reads that the job may have done then are no
    # heartbeats, since another job may read the same files.
    heartbeats: bool = False
    # Device number of the mount that the job reads through, as in cachefs.mount_table; "" where unknown.
    mount_device: str = ""
    # Id of the user who has sent this through a control file, as known to the mount; None where unknown. Ignored in
    # messages that come in another way.
    sent_by: int | None = None


class JobEpoch(Message, frozen=True):
    """The order of one epoch."""

    job: str
    consumer: str
    epoch: int
    order: bytes  # sample numbers, u32 little-endian


class LoaderView(Message, frozen=True):
    """The progress of a loader as seen by its process (cachefs.publishing.page). Times are seconds."""

    # The class of the loader's dataset, and the line that made the loader.
    name: str
    # Epochs that have begun; number of epochs in the program's arguments (0 where unknown).
    epochs: int = 0
    planned: int = 0
    # Samples of the current epoch: all of them (0 while unknown), and the delivered ones.
    epoch_length: int = 0
    epoch_samples: int = 0
    # Delivered samples of all epochs.
    samples: int = 0
    # Time that the loader was busy in this epoch, and in all epochs; and time that the loop has waited for its batches.
    epoch_busy: float = 0.0
    busy: float = 0.0
    waited: float = 0.0
    # Busy and waited time of the first epoch alone.
    first_busy: float = 0.0
    first_waited: float = 0.0
    workers: int = 0
    # Whether the samples' files are being learned from the files that are opened.
    learning: bool = False
    # Whether the samples' files were only learned from opened files.
    was_learned: bool = False


class JobProgress(Message, frozen=True):
    """A heartbeat."""

    job: str
    consumer: str
    epoch: int
    position: int  # delivered samples of the epoch
    ended: bool = False  # whether the consumer has finished
    note: str = ""  # what is not understood of the consumer, and what would help; "" where all is
    # Where a published epoch is only a part of one of the job's own epochs: the number of that epoch, and how many of
    # its samples come before the part; -1 where the epochs are the same.
    part_of: int = -1
    part_begins: int = 0
    # The consumer's loader, where it is a watched loader of torch.
    loader: LoaderView | None = None


class JobProgressResponse(Message, frozen=True):
    # Epochs, the current one or the next, whose orders the daemon does not know, as after a restart.
    wanted: list[int] = msgspec.field(default_factory=list)
    # Present troubles of the job's reads (see JobView.troubles).
    troubles: list[Trouble] = msgspec.field(default_factory=list)


class JobName(Message, frozen=True):
    job: str


class JobPriorityRequest(Message, frozen=True):
    """Sets the weight of a job where jobs share an origin."""

    job: str
    weight: float


class ConsumerView(Message, frozen=True):
    """The progress of a consumer."""

    consumer: str
    epoch: int
    position: int  # samples of the epoch that are read
    epoch_length: int  # samples; 0 while unknown
    known_epochs: list[int]
    rate: float  # samples per second
    matched: int  # reads that were where the sequence has them
    mismatched: int  # reads that no sequence explains
    state: str
    problem: str = ""
    ahead_bytes: int = 0  # bytes on the node that the consumer will read
    pushed_bytes: int = 0  # bytes that the consumer will read and that are in the page cache of a mount
    note: str = ""  # what its publisher does not understand of it, and what would help
    rank: int = 0
    world_size: int = 1
    epochs: int = 0  # epochs published as a sampler; 0 where they are published one by one
    mean_bytes: float = 0.0  # of a sample, in the current epoch; 0 while unknown
    loader: LoaderView | None = None
    # Seconds that reads have waited, by cause: `origin`, `peer`, `ssd`, `daemon`.
    stalled: dict[str, float] = msgspec.field(default_factory=dict)
    mount_device: str = ""  # as in JobPublication


class RefetchedBytes(Message, frozen=True):
    """Bytes that a job has fetched in one epoch although the node had them before."""

    epoch: int  # as the job counts them, from 0
    bytes: int
    dataset: int  # bytes of all that the job may read
    tiers: int  # bytes that the node's tiers have room for


class OriginShare(Message, frozen=True):
    """The demand of a job at one origin, and what it gets, through all nodes. Rates are bytes per second, as means of
    the last seconds."""

    origin: str  # name of its server
    wants: float  # what its readers will read at their own pace, as far as it is not on the node
    gets: float
    weight: float
    held_back: bool  # whether it gets less since the origin does not give what all jobs want
    share: float  # of what the origin gives, while the job is held back
    jobs: int  # jobs that use the origin
    all_want: float
    all_get: float
    fetched: int = 0  # bytes that this node has fetched for it since the job has last begun to use the origin


class JobView(Message, frozen=True):
    """The progress of a job."""

    job: str
    dataset: str
    snapshot: str
    source: str  # its publisher
    started: float  # unix seconds
    state: str
    consumers: list[ConsumerView]
    stalls: int = 0
    stall_seconds: float = 0.0
    # Bytes fetched for the job: from origins, and from other nodes of the cluster.
    fetched_bytes: int = 0
    peer_bytes: int = 0
    # By epoch, fetched bytes that the node had before.
    fetched_again: list[RefetchedBytes] = msgspec.field(default_factory=list)
    reason: str = ""  # why it ended; "" while it runs, where it ended by itself and where it was cancelled
    # Present troubles of its reads, the worst first, and those that have made its reads fail since it began.
    troubles: list[Trouble] = msgspec.field(default_factory=list)
    # Number of its stalls that still last, and the seconds since the first of them began.
    waiting: int = 0
    longest: float = 0.0
    # Its weight where jobs share an origin.
    weight: float = 1.0
    # What it wants of origins and gets.
    origins: list[OriginShare] = msgspec.field(default_factory=list)


class ReadaheadView(Message, frozen=True):
    """Readahead of a dataset by one rule, for readers who have published nothing."""

    # Name of the dataset; "" where it was removed.
    dataset: str
    snapshot: str
    # One of cachefs.planning.prefetch.readahead_budget.ReadaheadRule.
    rule: str
    counts: ReadaheadCounts


class JobList(Message, frozen=True):
    jobs: list[JobView]
    guessed: list[ReadaheadView] = msgspec.field(default_factory=list)


class StallRow(Message, frozen=True):
    """Stalls of one consumer in one epoch by one source."""

    job: str  # "" for reads of no published job
    consumer: str
    epoch: int
    source: str  # as in cachefs.messages.Stall
    count: int
    seconds: float
    longest: float  # seconds
    waiting: int = 0  # number of these stalls that still last


class StallRows(Message, frozen=True):
    rows: list[StallRow]
