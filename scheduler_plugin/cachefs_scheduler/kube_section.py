"""[kube] of the configuration: extender, webhooks and API server of Kubernetes."""

import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from cachefs_scheduler.section import AbsolutePath, OptionalPath, SchedulerSection

_HOST: Final = re.compile(r"[A-Za-z0-9._:%-]{1,253}")
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


def split_listen_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [HOST]:PORT. Raises ValueError with the expected form."""
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    clear = bare == host or ":" in bare
    if not (_HOST.fullmatch(bare) and clear and (":" not in bare or bare != host) and port.isdecimal()):
        raise ValueError('expected HOST:PORT, such as "0.0.0.0:8443" or "[::]:8443"')
    if int(port[:6]) >= 1 << 16:
        raise ValueError("expected a port up to 65535")
    return bare, int(port)


def _address(value: str) -> str:
    split_listen_address(value)
    return value


def _object_name(value: str) -> str:
    if value and not _NAME.fullmatch(value):
        raise ValueError("expected a name as Kubernetes has them: small letters, digits, dots and dashes")
    return value


Address = Annotated[str, AfterValidator(_address)]
ObjectName = Annotated[str, AfterValidator(_object_name)]


class KubeSection(SchedulerSection):
    """[kube]: the Kubernetes integration; absent if the file has no such table."""

    # Address for kube-scheduler and the API server's webhooks; with TLS if there is a certificate.
    listen: Address = "0.0.0.0:8443"
    tls_cert: OptionalPath = None
    tls_key: OptionalPath = None
    client_ca: OptionalPath = None
    # Largest request in bytes: `nodeCacheCapable: false` sends whole nodes.
    most_body: Annotated[int, Field(ge=1 << 20, le=1 << 30)] = 64 << 20
    # The API server: "pod" (that of the pod in which this runs), "off", or the path of a kubeconfig file.
    api: Literal["pod", "off"] | AbsolutePath = "off"
    # The Lease by which replicas elect the leader; namespace "": that of the pod, or the kubeconfig's.
    namespace: ObjectName = ""
    lease: Annotated[ObjectName, Field(min_length=1)] = "cachefs-scheduler"
    # Label selector of the followed pods; "": all pods, skipping those without the annotation.
    selector: Annotated[str, Field(max_length=1000)] = ""

    @model_validator(mode="after")
    def _certificate_and_key(self) -> "KubeSection":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both or neither")
        if self.client_ca is not None and self.tls_cert is None:
            raise ValueError("client_ca needs tls_cert and tls_key")
        return self
