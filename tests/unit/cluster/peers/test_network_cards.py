"""Which card has an address, and how far it is from this process's memory, as sysfs tells it."""

from collections.abc import Mapping
from pathlib import Path

from cachefs_cluster.peers.network_cards import NetworkCard, NetworkCards, card_addresses

NODES = {0: ("0-3,8", "10 21"), 1: ("4-7", "21 10")}


def system(root: Path, cards: Mapping[str, int]) -> Path:
    """A sysfs with two NUMA nodes and these cards, each with its node."""
    nodes = root / "devices" / "system" / "node"
    for number, (processors, distances) in NODES.items():
        (nodes / f"node{number}").mkdir(parents=True)
        (nodes / f"node{number}" / "cpulist").write_text(f"{processors}\n")
        (nodes / f"node{number}" / "distance").write_text(f"{distances}\n")
    (nodes / "online").write_text("0-1\n")
    for card, node in cards.items():
        device = root / "class" / "net" / card / "device"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return root


def cards(root: Path, addresses: Mapping[str, str], processors: set[int]) -> NetworkCards:
    return NetworkCards(root, lambda: addresses, lambda: processors)


def test_a_card_is_near_the_processors_of_its_node(tmp_path: Path) -> None:
    root = system(tmp_path, {"eth0": 0, "eth1": 1, "eth2": -1})
    addresses = {"10.0.0.1": "eth0", "10.0.1.1": "eth1", "fd00::1": "eth1", "10.0.2.1": "eth2"}
    found = cards(root, addresses, {4, 5})
    assert found.find_card("10.0.0.1") == NetworkCard("eth0", 21)
    assert found.find_card("10.0.1.1") == found.find_card("fd00::1%eth1") == NetworkCard("eth1", 10)
    assert found.find_card("10.0.2.1") == NetworkCard("eth2", 0)
    assert cards(root, addresses, {0, 1, 4, 5}).find_card("10.0.0.1").distance == 15.5
    assert cards(root, addresses, {99}).find_card("10.0.0.1").distance == 0, "no node has that processor"


def test_a_vlan_is_as_near_as_the_card_below_it(tmp_path: Path) -> None:
    root = system(tmp_path, {"eth1": 1, "eth2": 0})
    net = root / "class" / "net"
    for name, below in (("vlan5", ["eth1"]), ("bond0", ["eth1", "eth2"])):
        (net / name).mkdir()
        for each in below:
            (net / name / f"lower_{each}").symlink_to(net / each)
    found = cards(root, {"10.0.0.1": "vlan5", "10.0.1.1": "bond0"}, {4})
    assert found.find_card("10.0.0.1") == NetworkCard("vlan5", 10)
    assert found.find_card("10.0.1.1") == NetworkCard("bond0", 0)


def test_an_address_that_no_card_has_stands_for_itself(tmp_path: Path) -> None:
    assert cards(tmp_path, {}, {0}).find_card("10.9.9.9") == NetworkCard("10.9.9.9")


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    assert cards(tmp_path, {"10.0.0.1": "eth0"}, {0}).find_card("10.0.0.1") == NetworkCard("eth0", 0)


def test_this_machine_has_loopback() -> None:
    assert card_addresses()["127.0.0.1"] == "lo"
    assert NetworkCards().find_card("127.0.0.1") == NetworkCard("lo", 0)
