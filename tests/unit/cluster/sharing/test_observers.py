"""Who may ask a control endpoint what observers ask: by name without TLS, by certificate with it."""

from pathlib import Path

import pytest
from aiohttp import web

from cachefs.observe_messages import MEMBERS_PATH
from cachefs_cluster.node_sharing import security_of
from cachefs_cluster.peers.tls import Certificates, TlsFiles
from cachefs_cluster.sharing.endpoint import ControlEndpoint
from cachefs_cluster.sharing.observers import Observers
from cachefs_cluster.sharing.security import INSECURE, ConnectionSecurity
from cachefs_scheduler.config import ObservedClusterSection
from cachefs_scheduler.view.observer_client import NodeRequestFailed, ObserverClient
from tests import virtual_time
from tests.certificates import Authority
from tests.sharing import ToldMembership, node_record

OBSERVERS = Observers.from_names(["Looks"], ["orders"])


def test_names_are_compared_in_small_letters_and_proven_by_certificates() -> None:
    assert OBSERVERS.identify("looks", None) == OBSERVERS.identify("LOOKS", frozenset({"looks"})) == "looks"
    assert OBSERVERS.identify("orders", frozenset({"orders", "other"})) == "orders"
    assert OBSERVERS.identify("looks", frozenset({"other"})) == ""
    assert OBSERVERS.identify("looks", frozenset()) == ""
    assert OBSERVERS.identify("", None) == OBSERVERS.identify("stranger", frozenset({"stranger"})) == ""
    assert OBSERVERS.commanders == {"orders"}


async def members(security: ConnectionSecurity, section: ObservedClusterSection) -> str:
    """What an endpoint makes of an observer that asks: its cluster's name, or why not."""
    endpoint = ControlEndpoint("test", ToldMembership(node_record(1)), security, OBSERVERS)

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=b"\x83\xa7cluster\xa4test\xa2me\xa0\xa7members\x90")

    endpoint.add_route("GET", MEMBERS_PATH, answer)
    await endpoint.start("127.0.0.1", 0)
    asking = ObserverClient(section)
    try:
        return (await asking.fetch_members("127.0.0.1", endpoint.port)).cluster
    except NodeRequestFailed as error:
        return str(error)
    finally:
        await asking.close()
        await endpoint.stop()


def section(name: str, files: TlsFiles | None = None) -> ObservedClusterSection:
    if files is None:
        return ObservedClusterSection(name=name)
    return ObservedClusterSection(name=name, tls_ca=files.ca, tls_cert=files.cert, tls_key=files.key)


@pytest.mark.parametrize(
    ("name", "said"), [("looks", "test"), ("orders", "test"), ("stranger", "is not an observer of this node")]
)
def test_without_certificates_the_name_counts(name: str, said: str) -> None:
    assert said in virtual_time.run(members(INSECURE, section(name)))


def test_with_certificates_only_the_certificate_counts(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    security = security_of(Certificates(ours.issue("node-1")))
    assert virtual_time.run(members(security, section("looks", ours.issue("looks")))) == "test"
    assert "is not an observer of this node" in virtual_time.run(
        members(security, section("looks", ours.issue("somebody")))
    )
    assert "is not an observer of this node" in virtual_time.run(
        members(security, section("node-1", ours.issue("node-1")))
    )
    stranger = others.issue("looks")
    files = TlsFiles(ours.issue("looks").ca, stranger.cert, stranger.key)
    assert virtual_time.run(members(security, section("looks", files))) != "test"
