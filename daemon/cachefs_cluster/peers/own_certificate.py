"""The configured certificate of this node, and whether other nodes will accept it."""

from cachefs_cluster.peers.tls import TlsFiles, certificate_problem
from cachefs_cluster.section import ClusterSection


def own_certificate_problem(section: ClusterSection) -> str:
    """Return why other nodes would refuse this node's certificate; "" if they would not, or without TLS. Raises
    ConfigError if the certificate cannot be used at all."""
    files = tls_files(section) if section.enabled else None
    return certificate_problem(files, section.own_name) if files is not None else ""


def tls_files(section: ClusterSection) -> TlsFiles | None:
    """Return the configured TLS files; None without TLS."""
    if section.tls_ca is None or section.tls_cert is None or section.tls_key is None:
        return None
    return TlsFiles(section.tls_ca, section.tls_cert, section.tls_key)
