"""What the client of etcd does without any etcd; tests/node/daemon/test_etcd_membership.py has one."""

import grpc
import pytest

from cachefs_bench.lab.ports import free_port
from cachefs_cluster.membership import etcd_client
from cachefs_cluster.membership.etcd_client import EtcdClient, EtcdRefused, EtcdSettings


def test_channels_that_others_use_stay_open_where_certificates_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    client = EtcdClient(EtcdSettings([f"http://127.0.0.1:{free_port()}"]))
    [used] = client._channels
    monkeypatch.setattr(etcd_client, "_certificate_times", lambda _: [1])
    client._reload_certificates()
    assert client._channels != [used]
    with pytest.raises(grpc.RpcError):  # and no ValueError, as of one that is closed
        used.unary_unary("/etcdserverpb.KV/Range")(b"", timeout=0.1)
    client.close()
    used.close()


def test_certificates_that_cannot_be_read_for_a_moment_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    client = EtcdClient(EtcdSettings([f"http://127.0.0.1:{free_port()}"]))
    before, opened = client._channels, etcd_client._open_channel

    def refuse(*_: object) -> grpc.Channel:
        raise EtcdRefused("a certificate for etcd cannot be read")

    monkeypatch.setattr(etcd_client, "_certificate_times", lambda _: [1])
    monkeypatch.setattr(etcd_client, "_open_channel", refuse)
    with pytest.raises(EtcdRefused):
        client._reload_certificates()
    assert client._channels is before
    monkeypatch.setattr(etcd_client, "_open_channel", opened)
    client._reload_certificates()
    assert client._channels is not before
    for channel in (*before, *client._channels):
        channel.close()
