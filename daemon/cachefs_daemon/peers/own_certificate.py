"""The certificate that the configuration gives this node, and whether other nodes will accept it."""

from cachefs_daemon.cluster_section import ClusterSection
from cachefs_daemon.peers.tls import TlsFiles, remark


def certificate_remark(section: ClusterSection) -> str:
    """Why other nodes would refuse the certificate of this one; empty where they would not, and where there is none.
    Raises ConfigError where it cannot be used at all."""
    files = tls_files(section) if section.enabled else None
    return remark(files, section.own_name) if files is not None else ""


def tls_files(section: ClusterSection) -> TlsFiles | None:
    """What TLS between nodes is made of; None where they do without."""
    if section.tls_ca is None or section.tls_cert is None or section.tls_key is None:
        return None
    return TlsFiles(section.tls_ca, section.tls_cert, section.tls_key)
