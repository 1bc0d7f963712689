"""Prometheus metrics of the service. An HPA can scale by them through the Prometheus adapter."""

from collections import Counter
from collections.abc import Iterator

from cachefs_scheduler.duties.advisor import Advisor
from cachefs_scheduler.duties.capacity import cluster_capacity
from cachefs_scheduler.duties.job_table import AdmissionState
from cachefs_scheduler.duties.node_warmups import NodeWarmups
from cachefs_scheduler.view.reported_cluster import ReportedCluster


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
