"""What jobs, cachectl and the daemon say to each other about sequences (see cachefs.messages for the rules)."""

from typing import Final

import msgspec

from cachefs.messages import GuessCounts, Message, Trouble
from cachefs.planning.sequences.sampler_spec import SamplerSpec

# Characters that names may have.
MAX_JOB_NAME: Final = 128
MAX_CONSUMER_NAME: Final = 256
MAX_NOTE: Final = 1000


class SampleMap(Message, frozen=True):
    """Which bytes of which files each sample is."""

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


class JobPublish(Message, frozen=True):
    """One consumer of a job says how it will read."""

    job: str
    dataset: str
    snapshot: str = ""  # the first digits of its id; none: the dataset's current one
    consumer: str = "0"  # unique within the job
    spec: SamplerSpec | None = None
    map: SampleMap | None = None  # None: as this job said before, else `tree`
    rank: int = 0
    world_size: int = 1
    # The next three say how far out of order the consumer's loader reads.
    workers: int = 0  # of the loader
    batch_size: int = 1  # samples
    prefetch: int = 2  # batches that each worker reads ahead
    pid: int = 0  # the job ends with this process (0: none)
    # The pid namespace in which it has that number: the inode number of its /proc/self/ns/pid. 0: the daemon's.
    pid_namespace: int = 0
    lease: float = 60.0  # seconds without any sign of life after which it ends
    source: str = ""  # who publishes it
    # It says by itself that it is there, more often than its lease. Reads that it may have done are no sign of life
    # then: another one may be reading the same files.
    heartbeats: bool = False
    # Device number of the mount it reads through, as in cachefs.mount_table; empty where its publisher does not say.
    mount_device: str = ""
    # The id of the user who has sent it through a control file, as the mount knows; None: not known. It counts for
    # nothing in what comes in another way.
    sent_by: int | None = None


class JobEpoch(Message, frozen=True):
    """The order of one epoch."""

    job: str
    consumer: str
    epoch: int
    order: bytes  # sample numbers, u32 little-endian


class LoaderView(Message, frozen=True):
    """How a loader gets on, as its process sees it (cachefs.publishing.tally). Times are seconds."""

    # The class of its dataset, and the line that has made it.
    name: str
    # Epochs that have begun; how many there will be, as the program's arguments say (0: they say nothing).
    epochs: int = 0
    planned: int = 0
    # Samples of the epoch that it is in: all of them (0 while nobody knows), and those that are delivered.
    epoch_length: int = 0
    epoch_samples: int = 0
    # Samples of all epochs that are delivered.
    samples: int = 0
    # How long it was busy in this epoch; in all epochs; and how long the loop has waited in these for its batches.
    epoch_busy: float = 0.0
    busy: float = 0.0
    waited: float = 0.0
    # The same of the first epoch alone.
    first_busy: float = 0.0
    first_waited: float = 0.0
    workers: int = 0
    # Which files its samples are is being learned from what it opens.
    learning: bool = False
    # Did nothing but what it has opened say them?
    was_learned: bool = False


class JobProgress(Message, frozen=True):
    """A heartbeat."""

    job: str
    consumer: str
    epoch: int
    position: int  # samples of the epoch that are delivered
    ended: bool = False  # the consumer is through
    note: str = ""  # what is not understood of it, and what would help; empty where all is
    # Where what it publishes as an epoch is a part of one: which of the job's own epochs, and how many samples of that
    # come before the part. -1 where both count alike.
    part_of: int = -1
    part_begins: int = 0
    # Its loader, where a loader of torch is watched.
    loader: LoaderView | None = None


class JobProgressReply(Message, frozen=True):
    # Epochs, the current one or the next, whose orders the daemon does not know. It may have lost some in a restart.
    wanted: list[int] = msgspec.field(default_factory=list)
    # What is wrong now with what the job reads (see JobView.troubles).
    troubles: list[Trouble] = msgspec.field(default_factory=list)


class JobName(Message, frozen=True):
    job: str


class ConsumerView(Message, frozen=True):
    """How a consumer gets on."""

    consumer: str
    epoch: int
    position: int  # samples of the epoch that are read
    epoch_length: int  # samples; 0 while nobody knows
    known_epochs: list[int]
    rate: float  # samples per second
    matched: int  # reads that were where the sequence has them
    mismatched: int  # reads that no sequence explains
    state: str
    problem: str = ""
    ahead_bytes: int = 0  # bytes on the node that it will read
    pushed_bytes: int = 0  # bytes that it will read and that are in the page cache of some mount
    note: str = ""  # what its publisher does not understand of it, and what would help
    rank: int = 0
    world_size: int = 1
    epochs: int = 0  # that it has published as a sampler; 0 where it publishes them one by one
    mean_bytes: float = 0.0  # of a sample, in the epoch that it is in; 0 while nobody knows
    loader: LoaderView | None = None
    # Seconds that its reads have waited, by what they waited for: `origin`, `peer`, `ssd`, `daemon`.
    stalled: dict[str, float] = msgspec.field(default_factory=dict)
    mount_device: str = ""  # as in JobPublish


class FetchedAgain(Message, frozen=True):
    """What a job has fetched in one epoch although the node had it before."""

    epoch: int  # as the job counts them, from 0
    bytes: int
    dataset: int  # bytes of all that it may read
    tiers: int  # bytes that the node's tiers have room for


class JobView(Message, frozen=True):
    """How a job gets on."""

    job: str
    dataset: str
    snapshot: str
    source: str  # who published it
    started: float  # unix seconds
    state: str
    consumers: list[ConsumerView]
    stalls: int = 0
    stall_seconds: float = 0.0
    # Bytes that were fetched for it: from origins, and from other nodes of the cluster.
    fetched_bytes: int = 0
    peer_bytes: int = 0
    # By epoch, what was fetched although the node had it before.
    fetched_again: list[FetchedAgain] = msgspec.field(default_factory=list)
    reason: str = ""  # why it ended; empty where it said so itself or was cancelled, and while it runs
    # What is wrong now with what it reads, the worst first, and what has made its reads fail since it began.
    troubles: list[Trouble] = msgspec.field(default_factory=list)
    # Of its stalls, those that have not come to an end; and seconds that the first of them has waited.
    waiting: int = 0
    longest: float = 0.0


class GuessView(Message, frozen=True):
    """What was guessed of a dataset by one rule, for readers who have published nothing."""

    # Name of the dataset; empty where it is not there any more.
    dataset: str
    snapshot: str
    # One of cachefs.planning.prefetch.guess_counts.Rule.
    rule: str
    counts: GuessCounts


class JobList(Message, frozen=True):
    jobs: list[JobView]
    guessed: list[GuessView] = msgspec.field(default_factory=list)


class StallRow(Message, frozen=True):
    """Stalls of one consumer in one epoch from one source."""

    job: str  # empty where nobody has published what was read
    consumer: str
    epoch: int
    source: str  # as in cachefs.messages.Stall
    count: int
    seconds: float
    longest: float  # seconds
    waiting: int = 0  # of them, those that have not come to an end


class StallRows(Message, frozen=True):
    rows: list[StallRow]
