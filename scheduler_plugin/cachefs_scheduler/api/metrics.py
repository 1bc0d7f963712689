"""The figures by which an autoscaler decides, and the service's Prometheus metrics.

`cluster_capacity` computes the nodes' capacity and the jobs' demand. An HPA can scale by the metrics through the
Prometheus adapter.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from cachefs_scheduler.duties.advisor import Advisor
from cachefs_scheduler.duties.job_table import AdmissionState, JobTable
from cachefs_scheduler.duties.node_warmups import NodeWarmups
from cachefs_scheduler.view.reported_cluster import ReportedCluster


@dataclass(frozen=True, slots=True)
class ClusterCapacity:
    """Cluster capacity and demand, in bytes and nodes."""

    # Sum over nodes in state "up": bytes that their tiers can hold, and hold.
    capacity: int
    used: int
    # Bytes that running and waiting jobs read, each snapshot once.
    needed: int
    nodes: int
    # Number of average nodes that would hold `needed`; 0 if no capacity is known or nothing is needed.
    nodes_needed: int


def cluster_capacity(view: ReportedCluster, jobs: JobTable) -> ClusterCapacity:
    """Return the current figures."""
    up = [
        facts
        for name in view.cluster
        if (facts := view.cluster.reported_facts(name)) is not None and facts.state == "up"
    ]
    read = {one.snapshot for one in jobs if one.snapshot} | {snapshot for facts in up for snapshot in facts.jobs}
    sizes = [size.bytes for snapshot in read if (size := view.cluster.snapshot_facts(snapshot)) is not None]
    total, needed = sum(facts.capacity for facts in up), sum(sizes)
    nodes_needed = -(-needed * len(up) // total) if total else 0
    return ClusterCapacity(total, sum(facts.used for facts in up), needed, len(up), nodes_needed)


def metrics_page(view: ReportedCluster, advisor: Advisor, warmups: NodeWarmups) -> str:
    """Return the metrics page. No label names a job, user or node, which bounds the number of series."""
    return "".join(_lines(view, advisor, warmups))


def _lines(view: ReportedCluster, advisor: Advisor, warmups: NodeWarmups) -> Iterator[str]:
    found = cluster_capacity(view, advisor.jobs)
    yield _gauge("capacity_bytes", "Bytes that the tiers of all nodes may take.", found.capacity)
    yield _gauge("used_bytes", "Bytes that the tiers of all nodes take.", found.used)
    yield _gauge("needed_bytes", "Bytes that running and waiting jobs read, each block once.", found.needed)
    yield _gauge("nodes", "Nodes that take jobs.", found.nodes)
    yield _gauge("nodes_needed", "Nodes of average capacity that would hold needed_bytes.", found.nodes_needed)
    ratio = found.needed / found.capacity if found.capacity else 0.0
    yield _gauge("needed_ratio", "needed_bytes divided by capacity_bytes.", ratio)
    ages = [view.report_age(node.name) for node in view if node.reported_at is not None]
    yield _gauge("oldest_report_seconds", "Seconds for which one node has been silent.", max(ages, default=0))
    states = Counter(one.state for one in advisor.jobs)
    yield "# HELP cachefs_scheduler_jobs Jobs that schedulers have reported.\n# TYPE cachefs_scheduler_jobs gauge\n"
    for state in AdmissionState:
        yield f'cachefs_scheduler_jobs{{state="{state}"}} {states[state]}\n'
    running = Counter(one.purpose for one in warmups if not one.is_over)
    yield "# HELP cachefs_scheduler_warmups Warm-ups under way.\n# TYPE cachefs_scheduler_warmups gauge\n"
    for purpose in ("preload", "clone", "move"):
        yield f'cachefs_scheduler_warmups{{purpose="{purpose}"}} {running[purpose]}\n'


def _gauge(name: str, text: str, value: float) -> str:
    full = f"cachefs_scheduler_{name}"
    return (
        f"# HELP {full} {text}\n# TYPE {full} gauge\n{full} {value:g}\n"
        if isinstance(value, float)
        else (f"# HELP {full} {text}\n# TYPE {full} gauge\n{full} {value}\n")
    )
