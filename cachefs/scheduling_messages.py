"""Messages of cachefs-scheduler, as JSON over HTTP (see cachefs.messages for the rules).

The service, its parts for Kubernetes and Slurm, and `cachectl sched` use these records. Names of jobs begin with their
scheduler: `kube:NAMESPACE/NAME`, `slurm:JOBID`. Names of nodes are those of the scheduler.
"""

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from cachefs.messages import Message

STATUS_PATH: Final = "/v1/status"
QUEUE_PATH: Final = "/v1/queue"
NODES_PATH: Final = "/v1/nodes"
RANK_PATH: Final = "/v1/rank"
ASSIGN_PATH: Final = "/v1/assign"
ADMIT_PATH: Final = "/v1/admit"
ADMISSIONS_PATH: Final = "/v1/admissions"
PLACED_PATH: Final = "/v1/placed"
RESIZED_PATH: Final = "/v1/resized"
ENDED_PATH: Final = "/v1/ended"
KNOWN_PATH: Final = "/v1/known"
POLICY_PATH: Final = "/v1/policy"
EXPLAIN_PATH: Final = "/v1/explain"
SCALE_PATH: Final = "/v1/scale"
METRICS_PATH: Final = "/metrics"

MAX_NODES: Final = 16384
MAX_RANKS: Final = 16384
MAX_JOBS_PER_COPY: Final = 1_000_000

# Fits Kubernetes: a namespace and a name of at most 253 characters, with prefix and separator.
JobName = Annotated[str, msgspec.Meta(min_length=1, max_length=512, pattern=r"^[!-~]+$")]
NodeName = Annotated[str, msgspec.Meta(min_length=1, max_length=253, pattern=r"^[!-~]+$")]
# NAME, NAME@SNAPSHOT or NAME@latest.
DatasetName = Annotated[str, msgspec.Meta(min_length=1, max_length=320, pattern=r"^[!-~]+$")]
NodeNames = Annotated[list[NodeName], msgspec.Meta(max_length=MAX_NODES)]


class PlacementPolicy(StrEnum):
    """The action where no node that holds a job's dataset can take the job."""

    # Place the job elsewhere.
    PREFER = "prefer"
    # Refuse nodes that hold nothing of the dataset, where any node holds something.
    REQUIRE = "require"
    # Let the job wait until a copy has a slot; see `PlacementRequest.max_jobs_per_copy`.
    SUSPEND = "suspend"
    # Place the job elsewhere, and make another copy there.
    CLONE = "clone"


class PlacementRequest(Message, frozen=True):
    """A job to be placed."""

    job: JobName
    dataset: DatasetName
    policy: PlacementPolicy = PlacementPolicy.PREFER
    # Jobs that may read one copy at the same time; 0 for the limit of the dataset's policy.
    max_jobs_per_copy: Annotated[int, msgspec.Meta(ge=0, le=MAX_JOBS_PER_COPY)] = 0
    # Units that are placed separately and read together: pods, or nodes of a Slurm job.
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    # Order in the queue: users get equal numbers of slots; higher priorities go first.
    user: Annotated[str, msgspec.Meta(max_length=253)] = ""
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    # Bytes per second that each rank reads, and number of epochs; 0 where unknown.
    rate: Annotated[float, msgspec.Meta(ge=0.0, le=1e15)] = 0.0
    epochs: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0


class RankRequest(Message, frozen=True):
    """A request to rank nodes for a job."""

    ask: PlacementRequest
    # None for all nodes that the service knows.
    candidates: NodeNames | None = None


class Ranking(Message, frozen=True):
    """The suitability of nodes for a job."""

    # By node, 0 to 1 (best). Empty where nothing is known of the dataset, for the reason in `why`. A candidate unknown
    # to the service counts as a node that holds nothing.
    scores: dict[str, float] = msgspec.field(default_factory=dict)
    # Only for `require`: the nodes that must not be used, with the reason for each.
    refused: dict[str, str] = msgspec.field(default_factory=dict)
    why: str = ""
    # Age in seconds of the oldest information used.
    age: float = 0.0


class Assignment(Message, frozen=True):
    """Nodes for the ranks of a job, which together hold its data."""

    # By rank. A node appears several times only where there are fewer candidates than ranks.
    nodes: list[str] = msgspec.field(default_factory=list)
    why: str = ""


class JobAdmission(Message, frozen=True):
    """Whether a job may start."""

    job: str
    go: bool
    # The reason, for people.
    why: str = ""
    # Place in the queue of its dataset: 1 is next; 0 where the job does not wait.
    place: int = 0
    # Nodes on which copies are being made for the job (`clone`), or that have a slot for it.
    targets: list[str] = msgspec.field(default_factory=list)


class JobAdmissions(Message, frozen=True):
    """The admissions of all requested jobs that are not placed; the response to a long poll."""

    # Value for `after` in the next poll, which then waits until something changes.
    version: int
    jobs: list[JobAdmission] = msgspec.field(default_factory=list)


class PlacementReport(Message, frozen=True):
    """Reports that a job runs on these nodes, or is about to."""

    job: JobName
    nodes: NodeNames
    # For a service that does not know the job, as after a restart without its state.
    ask: PlacementRequest | None = None


class JobEndReport(Message, frozen=True):
    """Reports that a job has ended, whether it ran or not."""

    job: JobName


class KnownJobs(Message, frozen=True):
    """Names of known jobs that have not been reported as ended. A scheduler ends those that it no longer has."""

    jobs: list[str] = msgspec.field(default_factory=list)


class NodeEstimate(Message, frozen=True):
    """The estimated waiting of a job on a node."""

    node: str
    # 0 to 1.
    score: float
    # Seconds that one rank waits in its first epoch, and in each later one.
    first: float
    later: float
    # Bytes of an epoch by source: this node, its zone, other nodes, the origin.
    local: int
    zone: int
    elsewhere: int
    origin: int
    # Seconds since the node's last report.
    age: float = 0.0
    state: str = ""


class JobExplanation(Message, frozen=True):
    """The reasons for a job's placement or wait."""

    job: str
    dataset: str = ""
    policy: PlacementPolicy = PlacementPolicy.PREFER
    # Bytes of the dataset's snapshot.
    bytes: int = 0
    # asked, waiting, placed.
    state: str = ""
    # A few sentences.
    text: list[str] = msgspec.field(default_factory=list)
    # The best nodes, and the nodes on which the job runs.
    nodes: list[NodeEstimate] = msgspec.field(default_factory=list)
    placed: list[str] = msgspec.field(default_factory=list)


class DatasetPart(Message, frozen=True, array_like=True):
    """The part of a dataset that a node holds."""

    dataset: str
    # Bytes of its current snapshot on the node, and bytes of the whole snapshot.
    bytes: int
    total: int


class NodeStatus(Message, frozen=True):
    """A node, as known to the service."""

    # The scheduler's name of the node.
    name: str
    # joining, active, draining, away, or unknown.
    state: str
    # Seconds since the node's last report; its data counts less and less from the first minutes on.
    age: float
    # Bytes that its tiers may hold, and bytes that they hold.
    capacity: int = 0
    used: int = 0
    zone: str = ""
    # Datasets of which the node holds anything.
    datasets: list[DatasetPart] = msgspec.field(default_factory=list)
    # Running jobs that have published, on all datasets.
    jobs: int = 0
    # Why there was no recent report; "" where there was one.
    problem: str = ""


class NodesStatus(Message, frozen=True):
    """All nodes known to the service, sorted by name."""

    nodes: list[NodeStatus] = msgspec.field(default_factory=list)


class QueueEntry(Message, frozen=True):
    """A job known to the service."""

    job: str
    dataset: str
    user: str
    # asked, waiting, admitted or placed.
    state: str
    priority: int
    # Seconds since the first request for the job.
    seconds: float
    # Place in its queue; 0 where it does not wait.
    place: int = 0
    policy: PlacementPolicy = PlacementPolicy.PREFER
    nodes: list[str] = msgspec.field(default_factory=list)
    why: str = ""


class QueueStatus(Message, frozen=True):
    """Jobs known to the service: the waiting ones in their order, then the others."""

    jobs: list[QueueEntry] = msgspec.field(default_factory=list)


class WarmupStatus(Message, frozen=True):
    """A warmup that the service has ordered."""

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
    """A summary of the service."""

    version: str
    uptime: float
    nodes: int
    # Nodes that have reported within a minute; and seconds since the oldest last report of a node.
    fresh: int
    oldest: float
    datasets: int
    # Jobs by state.
    jobs: dict[str, int] = msgspec.field(default_factory=dict)
    # Bytes that all nodes may cache, bytes that they cache, and bytes that running jobs need.
    capacity: int = 0
    used: int = 0
    needed: int = 0
    # Number of nodes of average capacity that would hold the data of running jobs.
    nodes_needed: int = 0
    warmups: list[WarmupStatus] = msgspec.field(default_factory=list)
    problems: list[str] = msgspec.field(default_factory=list)


class DatasetPolicy(Message, frozen=True):
    """The policy for a dataset. In a request, None leaves a field as it is."""

    dataset: DatasetName
    max_jobs_per_copy: Annotated[int, msgspec.Meta(ge=0, le=MAX_JOBS_PER_COPY)] | None = None
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
    """The policy for a dataset, and its present state."""

    policy: DatasetPolicy
    copies: list[CopyStatus] = msgspec.field(default_factory=list)
    bytes: int = 0
    running: int = 0
    waiting: int = 0


class PolicyList(Message, frozen=True):
    """The policies of all datasets."""

    datasets: list[PolicyStatus] = msgspec.field(default_factory=list)


class ScaleRequest(Message, frozen=True):
    """A request for one change: move a job's data to these nodes, set a dataset's number of copies, or drain a node."""

    job: Annotated[str, msgspec.Meta(max_length=512)] = ""
    nodes: NodeNames = msgspec.field(default_factory=list)
    dataset: Annotated[str, msgspec.Meta(max_length=320)] = ""
    copies: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    drain: Annotated[str, msgspec.Meta(max_length=253)] = ""


class ScaleResult(Message, frozen=True):
    """The begun changes, in sentences."""

    text: list[str] = msgspec.field(default_factory=list)
