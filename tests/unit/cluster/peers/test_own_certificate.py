"""What a node is told of its own certificate before others refuse it."""

from pathlib import Path

import pytest

from cachefs.errors import ConfigError
from cachefs_cluster import config
from cachefs_cluster.peers.tls import TlsFiles, own_certificate_problem
from tests.certificates import Authority


def remark(files: TlsFiles, name: str = "a") -> str:
    section = config.parse(
        {
            "cluster": {
                "membership": "etcd", "etcd": ["http://127.0.0.1:2379"], "name": name, "tls_ca": str(files.ca),
                "tls_cert": str(files.cert), "tls_key": str(files.key),
            }
        }
    ).cluster  # fmt: skip
    return own_certificate_problem(section)


def test_a_certificate_that_others_accept_needs_no_remark(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    assert remark(authority.issue("a")) == ""
    assert remark(authority.issue("A", alternative=False)) == ""
    assert own_certificate_problem(config.ClusterConfig().cluster) == ""


def test_a_certificate_that_others_refuse_is_named(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    files, foreign = authority.issue("b"), other.issue("a")
    assert f"{str(files.cert)!r}: other nodes will refuse it: it names b, and not a" in remark(files)
    assert "other nodes will refuse it: " in (said := remark(TlsFiles(files.ca, foreign.cert, foreign.key)))
    assert "cluster.tls_ca" in said
    with pytest.raises(ConfigError, match="do not match"):
        remark(TlsFiles(files.ca, files.cert, foreign.key))
