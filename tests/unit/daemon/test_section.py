"""[cluster] of the configuration: each problem in a line that names key, value and the way out."""

import socket
from pathlib import Path
from typing import Any

import pytest

from cachefs_cluster import config
from cachefs_cluster.config import ClusterConfig
from cachefs_cluster.section import ClusterSection, StaticNode, is_loopback, parse_static_node, split_address
from cachefs_daemon.config import InvalidConfig

ETCD = {"membership": "etcd", "etcd": ["http://127.0.0.1:2379"], "name": "a"}
STATIC = {"membership": "static", "name": "a", "nodes": ["a=127.0.0.1:7380", "b=127.0.0.1:7480"]}


def parse(values: dict[str, Any]) -> ClusterConfig:
    return config.parse({"cluster": values})


def problems(values: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        parse(values)
    return caught.value.problems


def test_by_default_a_node_is_alone() -> None:
    assert not ClusterConfig().cluster.enabled
    assert list(ClusterConfig().remarks()) == []
    assert "cluster" not in ClusterConfig().summary()


def test_names_come_from_the_host_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu_1.example (x)")
    assert ClusterSection().own_name == "gpu_1.example-x"
    monkeypatch.setenv("POD_IP", "127.0.0.7")
    monkeypatch.setenv("NODE", "gpu7")
    found = parse({**ETCD, "name": "$NODE", "advertise": "$POD_IP", "zone": "$NODE"}).cluster
    assert (found.own_name, found.advertised_hosts[0], found.zone) == ("gpu7", "127.0.0.7", "gpu7")
    monkeypatch.delenv("NODE")
    assert problems({**ETCD, "name": "$NODE"}) == ["cluster.name = '$NODE': the environment has no variable NODE"]


def test_a_node_with_several_cards_has_a_list_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECOND", "10.0.1.5")
    two = {**ETCD, "insecure_peers": True, "listen": ["10.0.0.5:7380", "10.0.1.5:7380"]}
    assert parse(two).cluster.advertised_hosts == ("10.0.0.5", "10.0.1.5")
    assert parse(two).cluster.listen_addresses == (("10.0.0.5", 7380), ("10.0.1.5", 7380))
    assert parse(two).summary().endswith("(etcd) on 10.0.0.5:7380, 10.0.1.5:7380")
    named = {**two, "listen": "0.0.0.0:7380", "advertise": ["10.0.0.5", "$SECOND"]}
    assert parse(named).cluster.advertised_hosts == ("10.0.0.5", "10.0.1.5")
    assert parse({**ETCD, "advertise": ""}).cluster.advertised_hosts == ("127.0.0.1",)


def test_keys_and_summary() -> None:
    found = parse({**ETCD, "cluster": "c"})
    assert found.cluster.key_prefix == "/cachefs/c"
    assert found.summary().endswith(", node a of cluster c (etcd) on 127.0.0.1:7380")
    assert parse({**ETCD, "prefix": "/x/y"}).cluster.key_prefix == "/x/y"
    assert parse({**ETCD, "etcd": ["HTTPS://Etcd.Example", "https://[fd00::1]:7/"]}).cluster.etcd == (
        "https://etcd.example:2379", "https://[fd00::1]:7",
    )  # fmt: skip


def test_nodes_of_a_list() -> None:
    assert parse_static_node("b=[fd00::5]:7000 ,zone=r1, weight=2.5") == StaticNode("b", "fd00::5", 7000, "r1", 2.5)
    assert parse(STATIC).cluster.static_nodes[1] == StaticNode("b", "127.0.0.1", 7480)


@pytest.mark.parametrize(
    "text",
    ["", ":7380", "h", "h:", "h:0", "h:65535", "h:99999999999", "fd00::5:7380", "[fd00::5:7380", "[h]:1", "h :1"],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        split_address(text)
    assert "expected" in problems({**ETCD, "listen": text})[0]


@pytest.mark.parametrize("text", ["a", "a=", "=h:1", "a b=h:1", "a=h:1,x=2", "a=h:1,weight=0", "a=h:1,weight=nan"])
def test_what_is_no_node(text: str) -> None:
    (problem,) = problems({**STATIC, "nodes": [text]})
    assert problem.startswith(f"cluster.nodes.0 = {text!r}: ")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"etcd": []}, "cluster.etcd: is empty; list the URLs"),
        ({"etcd": ["ftp://x"]}, "cluster.etcd.0 = 'ftp://x': expected a URL"),
        ({"etcd": ["http://u:p@x"]}, "expected a URL"),
        ({"etcd": ["http://x:port"]}, "expected a URL"),
        ({"etcd": ["http://x", "https://y"]}, "give all the same"),
        ({"etcd_user": "u"}, "one is missing; they belong together"),
        ({"etcd_cert": "/dev/null"}, "one is missing; they belong together"),
        ({"etcd_ca": "/dev/null"}, "has no effect with http:// URLs"),
        ({"etcd_user": "u", "etcd_password_file": "/missing"}, "cluster.etcd_password_file = '/missing': No such file"),
        ({"tls_ca": "/dev/null"}, "cluster.tls_cert: is missing"),
        ({"tls_ca": "/missing", "tls_cert": "/dev/null", "tls_key": "/dev/null"}, "'/missing': No such file"),
        ({"listen": "0.0.0.0:7380", "insecure_peers": True}, "does not tell other nodes how to reach this node"),
        ({"listen": "10.0.0.1:7380"}, "without certificates only loopback is safe; set cluster.tls_ca"),
        ({"listen": []}, "at least 1 item"),
        ({"listen": ["127.0.0.1:7380", "x"]}, "cluster.listen.1 = 'x': expected HOST:PORT"),
        ({"listen": ["127.0.0.1:7380", "10.0.0.1:7380"]}, "cluster.listen = '10.0.0.1:7380': without certificates"),
        ({"listen": ["127.0.0.1:7380", "127.0.0.2:7380"]}, "without certificates a node has one address; set"),
        ({"advertise": ["127.0.0.1", "10.0.0.1"]}, "without certificates a node has one address; set"),
        ({"listen": ["10.0.0.1:7380", "10.0.1.1:7390"]}, "has the ports 7380 and 7390; a node has one port"),
        ({"listen": ["10.0.0.1:7380", "10.0.0.1:7380"]}, "cluster.listen: lists 10.0.0.1:7380 more than once"),
        ({"listen": ["0.0.0.0:7380", "10.0.0.1:7380"]}, "0.0.0.0 stands for all addresses of this machine"),
        ({"advertise": ["h"] * 9}, "at most 8 items"),
        ({"prefix": "x"}, "expected a prefix of keys"),
        ({"name": "a b"}, "expected up to 63 letters"),
        ({"advertise": "h:1 x"}, "expected the name or the address of a host"),
        ({"membership": "gossip"}, "expected 'none', 'static', 'etcd' or 'kubernetes'"),
        ({"replicas": 3}, "less than or equal to 2"),
        ({"weight": -1}, "greater than or equal to 0"),
        ({"grace": 0}, "greater than 0"),
        ({"cluster": ""}, "at least 1 character"),
        ({"etcd": "http://127.0.0.1:2379"}, "cluster.etcd = 'http://127.0.0.1:2379': expected a list"),
        ({"node": []}, "did you mean `nodes`?"),
    ],
)
def test_problems(change: dict[str, Any], problem: str) -> None:
    assert any(problem in found for found in problems({**ETCD, **change})), problems({**ETCD, **change})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"nodes": []}, "cluster.nodes: is empty"),
        ({"name": "c"}, "this node, c, is not in the list"),
        ({"listen": "127.0.0.1:7000"}, "other nodes expect this node (a) at port 7380"),
        ({"nodes": [*STATIC["nodes"], "b=127.0.0.1:7580"]}, "2 nodes have the name b"),
        ({"nodes": [*STATIC["nodes"], "c=127.0.0.1:7480"]}, "2 nodes have the address 127.0.0.1:7480"),
        ({"nodes": [*STATIC["nodes"], "c=127.0.0.1:7381"]}, "c has port 7381 of 127.0.0.1, which a needs too"),
        (
            {"nodes": [*STATIC["nodes"], "c=10.0.0.1:7380"]},
            "c at 10.0.0.1 is another machine, which needs certificates",
        ),
    ],
)
def test_problems_of_lists(change: dict[str, Any], problem: str) -> None:
    (found,) = problems({**STATIC, **change})
    assert problem in found


@pytest.mark.parametrize(
    ("change", "remarked"),
    [
        ({}, False),
        ({"etcd": ["http://10.0.0.2:2379"]}, True),
        ({"etcd": ["http://10.0.0.2:2379"], "listen": "10.0.0.5:7380", "insecure_peers": True}, False),
        ({"membership": "kubernetes", "etcd": []}, True),
    ],
)
def test_a_node_that_listens_where_the_others_are_not_is_remarked_on(change: dict[str, Any], remarked: bool) -> None:
    found = [line for line in parse({**ETCD, **change}).remarks() if "no other machine reaches this node" in line]
    assert len(found) == remarked


def test_certificates_or_trust_open_a_node_to_others(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text("")
    files = {f"tls_{name}": str(tmp_path / name) for name in ("ca", "cert", "key")}
    found = parse({**ETCD, "listen": "10.0.0.1:7380", **files})
    assert found.cluster.has_certificates
    assert list(found.remarks()) == []
    (remark,) = parse({**ETCD, "listen": "10.0.0.1:7380", "insecure_peers": True}).remarks()
    assert "any host that reaches this node over the network can read its cached data" in remark


def test_remarks(tmp_path: Path) -> None:
    (remark,) = parse({"nodes": STATIC["nodes"], "zone": "z"}).remarks()
    assert remark == "cluster.nodes: has no effect, since cluster.membership is none"
    password = tmp_path / "password"
    password.write_text("x")
    (remark,) = parse({**ETCD, "etcd_user": "u", "etcd_password_file": str(password)}).remarks()
    assert "goes over the network in the clear" in remark


def test_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "localhost"]))
    assert not any(map(is_loopback, ["10.0.0.1", "0.0.0.0", "::", "fe80::1%eth0", "gpu1", "localhost.example"]))
