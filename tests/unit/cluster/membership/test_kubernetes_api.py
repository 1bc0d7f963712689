"""The CA of an API server may be replaced while a pod runs."""

import ssl
from pathlib import Path

import pytest

from cachefs.errors import ConfigError
from cachefs_cluster.membership.kubernetes_api import LeaseApi, LeaseApiSettings
from tests.certificates import Authority
from tests.members import on_virtual_time


@on_virtual_time
async def test_a_ca_that_is_replaced_is_used_from_the_next_call_on(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    account = tmp_path / "account"
    account.mkdir()
    (account / "ca.crt").write_bytes(first._path.read_bytes())
    api = LeaseApi(LeaseApiSettings("https://127.0.0.1:1", "default", account), 1.0)
    try:
        before = api._newest_context()
        assert isinstance(before, ssl.SSLContext)
        assert before.check_hostname
        assert before.verify_mode == ssl.CERT_REQUIRED
        assert api._newest_context() is before
        # As the kubelet replaces it.
        (account / "new").write_bytes(second._path.read_bytes())
        (account / "new").rename(account / "ca.crt")
        after = api._newest_context()
        assert isinstance(after, ssl.SSLContext)
        assert after.get_ca_certs() != before.get_ca_certs()
        (account / "ca.crt").write_bytes(b"half of a file")
        assert api._newest_context() is after
        (account / "ca.crt").unlink()
        assert api._newest_context() is after
    finally:
        await api.close()
    with pytest.raises(ConfigError, match=r"ca\.crt"):
        LeaseApi(LeaseApiSettings("https://127.0.0.1:1", "default", account), 1.0)
