"""What cachefs-scheduler is asked and answers, as JSON over HTTP (see cachefs.messages for the rules).

The service, the parts of it that talk to Kubernetes and Slurm, and `cachectl sched` use these records. Names of jobs
say whose they are: `kube:NAMESPACE/NAME`, `slurm:JOBID`. Names of nodes are those of the scheduler.
"""

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from cachefs.messages import Message

STATUS: Final = "/v1/status"
QUEUE: Final = "/v1/queue"
NODES: Final = "/v1/nodes"
RANK: Final = "/v1/rank"
ASSIGN: Final = "/v1/assign"
ADMIT: Final = "/v1/admit"
ADMISSIONS: Final = "/v1/admissions"
PLACED: Final = "/v1/placed"
RESIZED: Final = "/v1/resized"
ENDED: Final = "/v1/ended"
KNOWN: Final = "/v1/known"
POLICY: Final = "/v1/policy"
EXPLAIN: Final = "/v1/explain"
SCALE: Final = "/v1/scale"
METRICS: Final = "/metrics"

MOST_NODES: Final = 16384
MOST_RANKS: Final = 16384
MOST_JOBS_PER_COPY: Final = 1_000_000

# As Kubernetes: a namespace and a name of 253 characters at most, with what stands before and between.
JobName = Annotated[str, msgspec.Meta(min_length=1, max_length=512, pattern=r"^[!-~]+$")]
NodeName = Annotated[str, msgspec.Meta(min_length=1, max_length=253, pattern=r"^[!-~]+$")]
# NAME, NAME@SNAPSHOT or NAME@latest.
DatasetName = Annotated[str, msgspec.Meta(min_length=1, max_length=320, pattern=r"^[!-~]+$")]
NodeNames = Annotated[list[NodeName], msgspec.Meta(max_length=MOST_NODES)]


class Policy(StrEnum):
    """What happens where no node that holds a job's dataset can take the job."""

    # The job goes elsewhere.
    PREFER = "prefer"
    # Nodes that hold nothing of it are refused, where any holds something.
    REQUIRE = "require"
    # The job waits until a copy has a slot; see `Ask.max_jobs_per_copy`.
    SUSPEND = "suspend"
    # The job goes elsewhere, and another copy is made there.
    CLONE = "clone"


class Ask(Message, frozen=True):
    """A job that is to be placed."""

    job: JobName
    dataset: DatasetName
    policy: Policy = Policy.PREFER
    # Jobs that may read one copy at the same time; 0: as the policy of the dataset says.
    max_jobs_per_copy: Annotated[int, msgspec.Meta(ge=0, le=MOST_JOBS_PER_COPY)] = 0
    # Units that are placed one by one and read together: pods, or nodes of a Slurm job.
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)] = 1
    # Whose turn it is in the queue: users get the same number of slots; higher priorities go first.
    user: Annotated[str, msgspec.Meta(max_length=253)] = ""
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    # Bytes in a second that each rank reads, and epochs; 0: not known.
    rate: Annotated[float, msgspec.Meta(ge=0.0, le=1e15)] = 0.0
    epochs: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0


class RankAsk(Message, frozen=True):
    """Which of these nodes suit a job."""

    ask: Ask
    # None: all nodes that the service knows.
    candidates: NodeNames | None = None


class Ranking(Message, frozen=True):
    """How well nodes suit a job."""

    # By node, 0 to 1 (best). Empty: nothing is known of the dataset, and `why` says what is lacking. A candidate that
    # the service does not know is in it as a node that holds nothing.
    scores: dict[str, float] = msgspec.field(default_factory=dict)
    # Only for `require`: the nodes that must not be taken, and why each.
    refused: dict[str, str] = msgspec.field(default_factory=dict)
    why: str = ""
    # Seconds since when the oldest of what was used is known.
    age: float = 0.0


class Assignment(Message, frozen=True):
    """Nodes for the ranks of a job, which together hold its data."""

    # By rank. A node may be named several times only where there are fewer candidates than ranks.
    nodes: list[str] = msgspec.field(default_factory=list)
    why: str = ""


class Admission(Message, frozen=True):
    """May a job start?"""

    job: str
    go: bool
    # In words, for people.
    why: str = ""
    # In the queue of its dataset: 1 is next; 0: it does not wait.
    place: int = 0
    # Nodes on which copies are being made for it (`clone`), or that have a slot for it.
    targets: list[str] = msgspec.field(default_factory=list)


class Admissions(Message, frozen=True):
    """Of all jobs that were asked for and are not placed; the answer to a long poll."""

    # To be given as `after` in the next poll: it then waits until something is different.
    version: int
    jobs: list[Admission] = msgspec.field(default_factory=list)


class Placed(Message, frozen=True):
    """A job runs on these nodes, or is about to."""

    job: JobName
    nodes: NodeNames
    # For a service that has not heard of the job before, as after a restart without its state.
    ask: Ask | None = None


class Ended(Message, frozen=True):
    """A job is no more, whether it ran or not."""

    job: JobName


class KnownJobs(Message, frozen=True):
    """Names of jobs that are known and not said to have ended. A scheduler ends those that it has no longer."""

    jobs: list[str] = msgspec.field(default_factory=list)


class NodeEstimate(Message, frozen=True):
    """What a job would wait for on a node."""

    node: str
    # 0 to 1.
    score: float
    # Seconds that one rank waits in its first epoch, and in each later one.
    first: float
    later: float
    # Bytes of an epoch, by where they would come from: this node, its zone, other nodes, the origin.
    local: int
    zone: int
    elsewhere: int
    origin: int
    # Seconds since the node has last said anything.
    age: float = 0.0
    state: str = ""


class Explanation(Message, frozen=True):
    """Why a job is where it is, or waits."""

    job: str
    dataset: str = ""
    policy: Policy = Policy.PREFER
    # Bytes of the dataset's snapshot.
    bytes: int = 0
    # asked, waiting, placed.
    state: str = ""
    # A few sentences.
    text: list[str] = msgspec.field(default_factory=list)
    # The best nodes, and those on which it runs.
    nodes: list[NodeEstimate] = msgspec.field(default_factory=list)
    placed: list[str] = msgspec.field(default_factory=list)


class HeldPart(Message, frozen=True, array_like=True):
    """What a node has of a dataset."""

    dataset: str
    # Bytes of its current snapshot that are there, and of all of it.
    bytes: int
    total: int


class NodeStatus(Message, frozen=True):
    """A node, as the service knows it."""

    # As schedulers call it.
    name: str
    # joining, active, draining, away, or unknown.
    state: str
    # Seconds since it has last said anything; its data counts less and less from the first minutes on.
    age: float
    # Bytes that its tiers may take, and that they take.
    capacity: int = 0
    used: int = 0
    zone: str = ""
    # Of which it has anything.
    datasets: list[HeldPart] = msgspec.field(default_factory=list)
    # Running jobs that have published, on all datasets.
    jobs: int = 0
    # Why nothing has come of it of late; empty where something has.
    problem: str = ""


class NodesStatus(Message, frozen=True):
    """All nodes that the service knows, in order of their names."""

    nodes: list[NodeStatus] = msgspec.field(default_factory=list)


class WaitingJob(Message, frozen=True):
    """A job that the service knows."""

    job: str
    dataset: str
    user: str
    # asked, waiting, admitted or placed.
    state: str
    priority: int
    # Seconds since it was first asked for.
    seconds: float
    # In its queue; 0: it does not wait.
    place: int = 0
    policy: Policy = Policy.PREFER
    nodes: list[str] = msgspec.field(default_factory=list)
    why: str = ""


class QueueStatus(Message, frozen=True):
    """Jobs that the service knows: those that wait in their order, then the others."""

    jobs: list[WaitingJob] = msgspec.field(default_factory=list)


class WarmupStatus(Message, frozen=True):
    """A warm-up that the service has ordered."""

    node: str
    dataset: str
    # preload, clone or move.
    purpose: str
    job: str
    # ordered, running, done, failed or stopped.
    state: str
    blocks: int = 0
    total: int = 0
    message: str = ""


class SchedulerStatus(Message, frozen=True):
    """The service, in short."""

    version: str
    uptime: float
    nodes: int
    # That have said something within a minute; and seconds since the one that is silent longest was heard.
    fresh: int
    oldest: float
    datasets: int
    # Jobs by state.
    jobs: dict[str, int] = msgspec.field(default_factory=dict)
    # Bytes that all nodes may cache, cache, and that running jobs need.
    capacity: int = 0
    used: int = 0
    needed: int = 0
    # Nodes of average capacity that would hold what running jobs need.
    nodes_needed: int = 0
    warmups: list[WarmupStatus] = msgspec.field(default_factory=list)
    problems: list[str] = msgspec.field(default_factory=list)


class DatasetPolicy(Message, frozen=True):
    """What holds for a dataset. In a request, what is None stays as it is."""

    dataset: DatasetName
    max_jobs_per_copy: Annotated[int, msgspec.Meta(ge=0, le=MOST_JOBS_PER_COPY)] | None = None
    max_copies: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    # none, ttl, lru or pin.
    cleanup: str | None = None
    # Seconds.
    ttl: Annotated[float, msgspec.Meta(gt=0, le=400 * 86400)] | None = None
    preload: bool | None = None
    release: bool | None = None


class CopyStatus(Message, frozen=True):
    """A copy of a dataset: nodes that together hold enough of it."""

    nodes: list[str]
    # 0 to 1.
    held: float
    jobs: int


class PolicyStatus(Message, frozen=True):
    """What holds for a dataset, and how it stands."""

    policy: DatasetPolicy
    copies: list[CopyStatus] = msgspec.field(default_factory=list)
    bytes: int = 0
    running: int = 0
    waiting: int = 0


class PolicyList(Message, frozen=True):
    """All datasets."""

    datasets: list[PolicyStatus] = msgspec.field(default_factory=list)


class ScaleAsk(Message, frozen=True):
    """Have a job's data follow it onto these nodes, a dataset be in so many copies, or a node leave: one of them."""

    job: Annotated[str, msgspec.Meta(max_length=512)] = ""
    nodes: NodeNames = msgspec.field(default_factory=list)
    dataset: Annotated[str, msgspec.Meta(max_length=320)] = ""
    copies: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    drain: Annotated[str, msgspec.Meta(max_length=253)] = ""


class ScaleDone(Message, frozen=True):
    """What was begun: sentences."""

    text: list[str] = msgspec.field(default_factory=list)
