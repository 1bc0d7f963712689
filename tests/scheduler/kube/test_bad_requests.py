"""What is malformed, huge, slow or too much never stops the extender, nor what others ask it meanwhile."""

import contextlib
import gzip
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.errors import ConfigError
from cachefs.pem_files import PemFiles
from cachefs_scheduler.certificates import ServerCertificates
from cachefs_scheduler.kube import kube_messages, server
from tests.advising import FakeAdvisor
from tests.certificates import Authority
from tests.scheduler.kube.bodies import annotated, recorded
from tests.scheduler.kube.serving import NAME, Served, serving

NODES = [f"gpu-{number:04}" for number in range(5000)]
HELD = {"node-b": 1.0, **dict.fromkeys(NODES[:10], 1.0)}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("bad"), FakeAdvisor(HELD)) as service:
        yield service


def well(served: Served) -> None:
    """Does it answer as ever?"""
    one = next(each for each in recorded() if each.verb == "prioritize")
    assert served.scores(annotated(one.body, dataset="imagenet"))["node-b"] == 10


def full(nodes: int, node_bytes: int = 0, **annotations: str) -> bytes:
    """A request with so many whole nodes, each a recorded one, and so many bytes more."""
    one = next(each for each in recorded() if "v1.36.2_nodeCacheCapable_false" in each.name)
    args: dict[str, Any] = json.loads(annotated(one.body, **annotations))
    pattern = args["Nodes"]["items"][0]
    pattern["metadata"]["annotations"] = {"filling": 'x"},{\\' * (node_bytes // 6)}
    args["Nodes"]["items"] = [
        pattern
        | {"metadata": {"name": name} | {key: value for key, value in pattern["metadata"].items() if key != "name"}}
        for name in NODES[:nodes]
    ]
    return json.dumps(args, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"text"', b"\xff\xfe\x00", b"[" * 100_000, b'{"Pod":' * 5000, b'{"Pod":[]}',
        b'{"NodeNames":[1]}', b'{"Nodes":{"items":[{}]}}', b'{"Nodes":{"items":[{"metadata":{"name":7}}]}}',
        b'{"Pod":{"metadata":{"labels":[]}}}', b'{"Pod":{"metadata":{"annotations":{"a":1}}},"NodeNames":["a"]}',
    ],
    ids=range(14),
)  # fmt: skip
@pytest.mark.parametrize("verb", ["filter", "prioritize", "mutate", "mutate/affinity"])
def test_a_malformed_request_is_refused_in_one_line(served: Served, verb: str, body: bytes) -> None:
    status, found = served.ask(verb, body)
    assert status == 400
    assert found.count(b"\n") == 1
    assert b"Traceback" not in found


def test_a_request_without_pod_and_nodes_gets_an_empty_answer(served: Served) -> None:
    assert served.answer("prioritize", b"{}") == []
    assert served.answer("filter", b'{"Pod":null,"Nodes":null,"NodeNames":null}')["FailedNodes"] == {}


_texts = st.text(max_size=30)
_annotations = st.dictionaries(
    st.sampled_from(["dataset", "policy", "max-jobs-per-copy", "ranks", "other"]), _texts | st.just("3"), max_size=5
)


@given(
    annotations=_annotations, nodes=st.lists(_texts, max_size=5, unique=True), labels=st.dictionaries(_texts, _texts)
)
def test_whatever_annotations_and_names_are_each_node_gets_a_score(
    served: Served, annotations: dict[str, str], nodes: list[str], labels: dict[str, str]
) -> None:
    metadata = {
        "name": "a", "namespace": "b", "uid": "c", "labels": labels,
        "annotations": {f"cachefs.io/{name}": value for name, value in annotations.items()},
    }  # fmt: skip
    found = served.answer("prioritize", json.dumps({"Pod": {"metadata": metadata}, "NodeNames": nodes}).encode())
    assert [entry["Host"] for entry in found] == nodes
    assert all(0 <= entry["Score"] <= 10 for entry in found)


def test_a_body_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with serving(tmp_path, FakeAdvisor(HELD), most_body=1 << 20) as service:
        connection = service.connect()
        connection.putrequest("POST", "/filter")
        connection.putheader("Content-Length", str(1 << 40))
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()
        connection = service.connect()
        connection.request("POST", "/filter", iter([b"x" * 100_000] * 11), encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()
        well(service)


@pytest.mark.parametrize("policy", ["prefer", "require"])
def test_five_thousand_whole_nodes(served: Served, policy: str) -> None:
    """Read in pieces, with texts in them that look like the end of a node."""
    body = full(5000, 300, dataset="imagenet", policy=policy)
    assert len(body) > 5 * kube_messages.LARGE_BYTES
    scores = served.scores(body)
    assert list(scores) == NODES
    assert [name for name, score in scores.items() if score] == NODES[:10]
    found = served.answer("filter", body)
    kept = NODES[:10] if policy == "require" else NODES
    items = found["Nodes"]["items"]
    assert [node["metadata"]["name"] for node in items] == kept
    assert items == json.loads(body)["Nodes"]["items"][: len(kept)]
    assert len(found["FailedNodes"]) == len(NODES) - len(kept)


@pytest.mark.parametrize("policy", ["prefer", "require"])
def test_whole_nodes_that_no_go_program_has_written(served: Served, policy: str) -> None:
    """With blanks, and the name not first: they are no less right, and read at once."""
    args = json.loads(full(1500, 300, dataset="imagenet", policy=policy))
    args["Nodes"]["items"] = [
        {"spec": node["spec"], "metadata": dict(reversed(node["metadata"].items()))} for node in args["Nodes"]["items"]
    ]
    body = json.dumps(args, indent=1).encode()
    assert len(body) > kube_messages.LARGE_BYTES
    found = served.answer("filter", body)
    assert found["Nodes"]["items"] == args["Nodes"]["items"][: 10 if policy == "require" else None]
    assert list(served.scores(body)) == NODES[:1500]


def test_a_large_body_that_breaks_off_in_the_middle_of_a_node_is_malformed(served: Served) -> None:
    body = full(2000, 300)
    status, _ = served.ask("filter", body[: len(body) // 2] + b"]}")
    assert status == 400
    well(served)


def test_64_requests_at_once_are_all_answered_right(served: Served) -> None:
    one = next(each for each in recorded() if each.verb == "filter" and "true" in each.name)
    small, large = annotated(one.body, dataset="imagenet"), full(1000, dataset="imagenet")

    def ask(number: int) -> list[str]:
        return list(served.scores(large if number % 16 == 0 else small))

    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(ask, range(128)))
    assert [len(names) for names in found] == [1000 if number % 16 == 0 else 3 for number in range(128)]


def test_who_sends_slowly_holds_up_nobody_and_is_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some say nothing, some begin a handshake, a request line or a body, and do not go on."""
    monkeypatch.setattr(server, "BODY_SECONDS", 1.0)
    silent = [socket.create_connection(("127.0.0.1", served.port), 60) for _ in range(20)]
    for one in silent[10:]:
        one.sendall(b"\x16\x03\x01")
    started = [served.connect() for _ in range(40)]
    for number, connection in enumerate(started):
        connection.connect()
        rest = b"Content-Length: 9\r\n\r\n{" if number % 2 else b"X: "
        connection.send(b"POST /filter HTTP/1.1\r\nHost: a\r\n" + rest)
    well(served)
    assert started[1].sock.recv(1 << 10).startswith(b"HTTP/1.1 408")
    for connection in (*started, *silent):
        connection.close()
    well(served)


def test_with_too_many_connections_the_silent_ones_are_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 8)
    silent = [served.connect() for _ in range(12)]
    for connection in silent:
        connection.connect()
    well(served)
    assert silent[0].sock.recv(1) == b""
    for connection in silent:
        connection.close()


def test_bodies_that_come_slowly_keep_no_other_caller_away(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller with most of them loses its oldest; what has no body is answered in any case."""
    monkeypatch.setattr(server, "MAX_ARRIVING", 8)
    monkeypatch.setattr(server, "BODY_SECONDS", 60.0)
    slow = [served.connect() for _ in range(10)]
    for connection in slow:
        connection.connect()
        connection.send(b"POST /mutate HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n\r\n{")
    monkeypatch.setattr(server, "MAX_REQUESTS", 0)  # /healthz counts in no bound
    connection = served.connect()
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200
    connection.close()
    monkeypatch.setattr(server, "MAX_REQUESTS", 8)
    well(served)
    for connection in slow[:2]:  # they are cut off; a socket that stays open would time out here
        with contextlib.suppress(ConnectionError):
            while connection.sock.recv(1 << 10):
                pass
    for connection in slow:
        connection.close()


def test_large_bodies_that_do_not_come_keep_no_other_address_away(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BODY_SECONDS", 600.0)
    monkeypatch.setattr(server, "RESPONSE_SECONDS", 600.0)
    slow = [served.connect() for _ in range(10)]
    for connection in slow:
        connection.connect()
        connection.send(b"POST /filter HTTP/1.1\r\nHost: a\r\nContent-Length: 2000000\r\n\r\n{")
    body = full(1000, dataset="imagenet")
    assert len(body) > kube_messages.LARGE_BYTES
    for _ in range(2 * server.MAX_LARGE):  # what was answered leaves its room to others
        other = served.connect()
        other.source_address = ("127.0.0.2", 0)
        other.request("POST", "/prioritize", body, {"Content-Type": "application/json"})
        answer = other.getresponse()
        assert (answer.status, len(json.loads(answer.read()))) == (200, 1000)
        other.close()
    for connection in slow:
        connection.close()


def test_more_requests_than_it_takes_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_REQUESTS", 0)
    status, found = served.ask("filter", b"{}")
    assert (status, found) == (503, b"0 requests are being answered already\n")
    monkeypatch.undo()
    well(served)


def test_clients_that_go_away_in_the_middle_stop_nothing(served: Served) -> None:
    body = full(3000, dataset="imagenet")

    def leave() -> None:
        connection = served.connect()
        try:
            connection.putrequest("POST", "/filter")
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders()
            connection.send(body[: len(body) // 2])
        except (OSError, HTTPException):
            pass
        connection.close()

    leaving = [threading.Thread(target=leave) for _ in range(8)]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join(60)
    well(served)


def test_a_certificate_that_is_replaced_is_used_without_a_restart(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachefs_scheduler.certificates.CHECK_SECONDS", 0.0)
    assert served.section.tls_cert is not None
    assert served.section.tls_key is not None

    def serial() -> int:
        connection = served.connect()
        connection.connect()
        number = int(connection.sock.getpeercert()["serialNumber"], 16)
        connection.close()
        return number

    first = serial()
    authority = Authority(tmp_path / "another")
    files = authority.issue(NAME)
    # Only one of the two is there yet: the former pair stays.
    old = served.section.tls_cert.read_bytes(), served.section.tls_key.read_bytes()
    served.section.tls_cert.write_bytes(files.cert.read_bytes())
    assert serial() == first
    served.section.tls_key.write_bytes(files.key.read_bytes())
    served.context.load_verify_locations(cafile=files.ca)
    assert serial() != first
    served.section.tls_cert.write_bytes(old[0])
    served.section.tls_key.write_bytes(old[1])
    well(served)


def test_who_has_no_certificate_is_not_answered_where_one_is_asked_for(tmp_path: Path) -> None:
    clients = Authority(tmp_path / "clients")
    client = clients.issue("kube-scheduler")
    with serving(tmp_path, FakeAdvisor(HELD), client_ca=client.ca) as service:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            service.ask("filter", b"{}")
        service.context.load_cert_chain(client.cert, client.key)
        well(service)


@pytest.mark.parametrize("broken", ["cert", "key", "other key"])
def test_files_that_are_no_certificates_are_named(tmp_path: Path, broken: str) -> None:
    authority = Authority(tmp_path / "authority")
    files, others = authority.issue(NAME), authority.issue(NAME)
    cert = tmp_path / "none" if broken == "cert" else files.cert
    key = {"key": files.ca, "other key": others.key}.get(broken, files.key)
    with pytest.raises(ConfigError, match=r"^tls_cert = '.*', tls_key = '.*': .+$"):
        ServerCertificates(PemFiles(cert, key))


def test_a_compressed_request_is_refused_before_it_grows(served: Served) -> None:
    # 61 KB were 60 MB, for each of 256 requests at a time.
    body = gzip.compress(b'{"Pod":{},"NodeNames":["a"],"x":"' + b"a" * (8 << 20) + b'"}')
    connection = served.connect()
    try:
        connection.request("POST", "/prioritize", body, {"Content-Encoding": "gzip"})
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (415, b"requests must not be compressed\n")
    finally:
        connection.close()
    well(served)


@pytest.mark.parametrize("verb", ["filter", "prioritize", "mutate"])
def test_a_text_that_is_no_utf8_is_refused_in_one_line(served: Served, verb: str) -> None:
    key = b"object" if verb == "mutate" else b"Pod"
    pod = b'{"%s":{"metadata":{"name":"\xff"}},"NodeNames":["a"],"uid":"u"}' % key
    status, found = served.ask(verb, b'{"request":%s}' % pod if verb == "mutate" else pod)
    assert (status, found.count(b"\n")) == (400, 1)
    assert b"utf-8" in found.lower()
