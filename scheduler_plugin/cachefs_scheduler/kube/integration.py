"""Assembles and starts the Kubernetes integration."""

import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cachefs.pem_files import PemFiles
from cachefs_scheduler.advisor_interface import AdvisorInterface
from cachefs_scheduler.certificates import ServerCertificates
from cachefs_scheduler.kube.admission_webhook import AdmissionWebhook
from cachefs_scheduler.kube.extender import Extender
from cachefs_scheduler.kube.gangs import PodGangs
from cachefs_scheduler.kube.kube_metrics import kube_metrics
from cachefs_scheduler.kube.server import KubeServer, ListenAddress, StatusSources
from cachefs_scheduler.kube_section import KubeSection, split_listen_address

if TYPE_CHECKING:
    from cachefs_scheduler.kube.pod_controller import PodController


_SETTINGS: Final = ("kube.tls_cert", "kube.tls_key", "kube.client_ca")


class KubeIntegration:
    """The Kubernetes integration, a cachefs_scheduler.integration.SchedulerIntegration."""

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
