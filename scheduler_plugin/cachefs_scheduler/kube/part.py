"""Assembles and starts the Kubernetes integration."""

import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cachefs.pem_files import PemFiles
from cachefs_scheduler.advice import Advice
from cachefs_scheduler.certificates import ServerCertificates
from cachefs_scheduler.kube.admission import Admission
from cachefs_scheduler.kube.extender import Extender
from cachefs_scheduler.kube.gangs import Gangs
from cachefs_scheduler.kube.server import Address, KubeServer, Shown
from cachefs_scheduler.kube.shown import shown
from cachefs_scheduler.kube_section import KubeSection, split_address

if TYPE_CHECKING:
    from cachefs_scheduler.kube.following import Following


_SETTINGS: Final = ("kube.tls_cert", "kube.tls_key", "kube.client_ca")


class KubePart:
    """The Kubernetes integration, a cachefs_scheduler.part.Part."""

    def __init__(self, section: KubeSection, advice: Advice, metrics: Callable[[], str]) -> None:
        """metrics: returns the metrics of the rest of the service. Raises ConfigError."""
        self._rest = metrics
        self._section = section
        self._advice = advice
        self._gangs = Gangs()
        self._extender = Extender(advice, self._gangs)
        host, port = split_address(section.listen)
        context = None
        if section.tls_cert is not None and section.tls_key is not None:
            files = PemFiles(section.tls_cert, section.tls_key, section.client_ca, _SETTINGS)
            # kube-scheduler 1.20 (Go 1.15) and later support TLS 1.3; older proxies in between may not.
            context = ServerCertificates(files, ssl.TLSVersion.TLSv1_2).context
        self._address = Address(host, port, context, section.most_body)
        self.server = KubeServer(self._extender, Admission(advice, self._opens), Shown(self._metrics, self._is_well))
        self._following: Following | None = None

    async def start(self) -> None:
        """Start the server and the controller. Raises CachefsError."""
        if self._section.api != "off":
            from cachefs_scheduler.kube.api import connect
            from cachefs_scheduler.kube.following import Following

            api = await connect(str(self._section.api), self._section.namespace)
            names = (
                self._section.lease,
                f"{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns():x}",
                self._section.selector,
            )
            self._following = Following(api, self._advice, self._gangs, names)
            self._following.start()
        await self.server.start(self._address)

    async def stop(self) -> None:
        await self.server.stop()
        if self._following is not None:
            await self._following.stop()

    def follows(self) -> str:
        """See Part.follows. Without an API server there is no Lease, and each replica acts for itself."""
        if self._section.api == "off" or (self._following is not None and self._following.leads):
            return ""
        holder = self._following.leader.holder if self._following is not None else ""
        which = f"the replica that does is {holder}" if holder else "no replica does yet"
        return f"this replica of cachefs-scheduler does not lead; {which}"

    def _opens(self) -> bool:
        return self._following is not None and self._following.opens

    def _is_well(self) -> bool:
        return self._following is None or not self._following.is_broken

    def _metrics(self) -> str:
        return self._rest() + shown(self._extender.counts, self._following)


def open_part(section: KubeSection, advice: Advice, metrics: Callable[[], str] = str) -> KubePart:
    """Return the integration for *section*. metrics: returns the metrics of the rest of the service, served with those
    of the integration. Raises ConfigError."""
    return KubePart(section, advice, metrics)
