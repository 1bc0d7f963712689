"""Assembles and starts the Kubernetes integration, and writes its Prometheus metrics."""

import os
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from cachefs.pem_files import PemFiles
from cachefs_scheduler.advisor_interface import AdvisorInterface
from cachefs_scheduler.certificates import ServerCertificates
from cachefs_scheduler.config import KubeSection, split_listen_address
from cachefs_scheduler.kube.admission_webhook import AdmissionWebhook
from cachefs_scheduler.kube.extender import Extender, ExtenderCounts
from cachefs_scheduler.kube.gangs import PodGangs
from cachefs_scheduler.kube.server import KubeServer, ListenAddress, StatusSources

if TYPE_CHECKING:
    from cachefs_scheduler.kube.pod_controller import PodController

_SETTINGS: Final = ("kube.tls_cert", "kube.tls_key", "kube.client_ca")


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

    requests = {'{verb="filter"}': counts.filtered, '{verb="prioritize"}': counts.prioritized}
    add("cachefs_scheduler_extender_requests_total", "counter", "Requests of kube-scheduler.", requests)
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


class KubeIntegration:
    """The Kubernetes integration, a cachefs_scheduler.advisor_interface.SchedulerIntegration."""

    def __init__(self, section: KubeSection, advisor: AdvisorInterface, metrics: Callable[[], str]) -> None:
        """metrics: returns the metrics of the rest of the service. Raises ConfigError."""
        self._service_metrics = metrics
        self._section = section
        self._advisor = advisor
        self._gangs = PodGangs()
        self._extender = Extender(advisor, self._gangs)
        host, port = split_listen_address(section.listen)
        context = None
        if section.tls_cert is not None and section.tls_key is not None:
            files = PemFiles(section.tls_cert, section.tls_key, section.client_ca, _SETTINGS)
            # kube-scheduler 1.20 (Go 1.15) and later support TLS 1.3; older proxies in between may not.
            context = ServerCertificates(files, ssl.TLSVersion.TLSv1_2).context
        self._address = ListenAddress(host, port, context, section.most_body)
        self.server = KubeServer(
            self._extender,
            AdmissionWebhook(advisor, self._can_open_gates),
            StatusSources(self._metrics, self._is_healthy),
        )
        self._controller: PodController | None = None

    async def start(self) -> None:
        """Start the server and the controller. Raises CachefsError."""
        if self._section.api != "off":
            from cachefs_scheduler.kube.api import connect
            from cachefs_scheduler.kube.pod_controller import PodController

            api = await connect(str(self._section.api), self._section.namespace)
            names = (
                self._section.lease,
                f"{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns():x}",
                self._section.selector,
            )
            self._controller = PodController(api, self._advisor, self._gangs, names)
            self._controller.start()
        await self.server.start(self._address)

    async def stop(self) -> None:
        await self.server.stop()
        if self._controller is not None:
            await self._controller.stop()

    def reason_not_leading(self) -> str:
        """See SchedulerIntegration.reason_not_leading. Without an API server there is no Lease, and each replica acts
        for itself."""
        if self._section.api == "off" or (self._controller is not None and self._controller.is_leader):
            return ""
        holder = self._controller.leader.holder if self._controller is not None else ""
        which = f"the leader is {holder}" if holder else "there is no leader yet"
        return f"this replica of cachefs-scheduler does not lead; {which}"

    def _can_open_gates(self) -> bool:
        return self._controller is not None and self._controller.can_open_gates

    def _is_healthy(self) -> bool:
        return self._controller is None or not self._controller.is_broken

    def _metrics(self) -> str:
        return self._service_metrics() + kube_metrics(self._extender.counts, self._controller)


def open_integration(
    section: KubeSection, advisor: AdvisorInterface, metrics: Callable[[], str] = str
) -> KubeIntegration:
    """Return the integration for *section*. metrics: returns the metrics of the rest of the service, served with those
    of the integration. Raises ConfigError."""
    return KubeIntegration(section, advisor, metrics)
