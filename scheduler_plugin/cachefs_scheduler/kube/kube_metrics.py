"""Prometheus metrics of the Kubernetes integration."""

from collections.abc import Mapping
from typing import Protocol

from cachefs_scheduler.kube.extender import ExtenderCounts


class PodControllerStatus(Protocol):
    """The subset of pod_controller.PodController that `kube_metrics` needs."""

    gates_opened: int
    events_written: int

    @property
    def is_leader(self) -> bool: ...

    @property
    def problem(self) -> str: ...

    def __len__(self) -> int: ...


def kube_metrics(counts: ExtenderCounts, followed: PodControllerStatus | None) -> str:
    """Return the metrics. followed: None if pods are not followed."""
    lines: list[str] = []

    def add(name: str, kind: str, what: str, values: Mapping[str, float]) -> None:
        lines.extend((f"# HELP {name} {what}", f"# TYPE {name} {kind}"))
        lines.extend(f"{name}{label} {value:g}" for label, value in values.items())

    asked = {'{verb="filter"}': counts.filtered, '{verb="prioritize"}': counts.prioritized}
    add("cachefs_scheduler_extender_requests_total", "counter", "Requests of kube-scheduler.", asked)
    seconds = {f'{{verb="{verb}"}}': value for verb, value in counts.seconds.items()}
    add("cachefs_scheduler_extender_seconds_total", "counter", "Total seconds of all responses.", seconds)
    slow = {f'{{verb="{verb}"}}': float(value) for verb, value in counts.slow.items()}
    add("cachefs_scheduler_extender_slow_total", "counter", "Responses that took longer than 50 ms.", slow)
    for name, what, value in (
        ("unannotated", "Requests for pods that name no dataset.", counts.unannotated),
        ("errors", "Responses without scores after an internal error.", counts.errors),
        ("refused_nodes", "Nodes that were refused for the policy require.", counts.refused_nodes),
    ):
        add(f"cachefs_scheduler_extender_{name}_total", "counter", what, {"": value})
    if followed is not None:
        add("cachefs_scheduler_leads", "gauge", "1: this replica opens gates.", {"": float(followed.is_leader)})
        add("cachefs_scheduler_watching", "gauge", "1: pods are followed.", {"": float(not followed.problem)})
        add("cachefs_scheduler_pods", "gauge", "Pods that are followed.", {"": len(followed)})
        add("cachefs_scheduler_gates_opened_total", "counter", "Gates that were opened.", {"": followed.gates_opened})
        add("cachefs_scheduler_events_total", "counter", "Events that were written.", {"": followed.events_written})
    return "\n".join(lines) + "\n"
