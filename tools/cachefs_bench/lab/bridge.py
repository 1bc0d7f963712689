"""A bridged network of hosts at the kernel's full speed, with limits, losses and cuts.

The bridge is on a host of its own, the *hub*, which also runs the shared services: the origin, etcd. Limits are tbf
queues towards a host, as in a switch. Losses and cuts are nftables rules on the bridge, which are replaced together.
Hosts may have several network cards (eth0, eth1): each has a bridge, a *rail*, and a subnet of its own.
"""

import fcntl
import json
import socket
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Final

from cachefs_bench.lab.host import LabHost, create_host, require_root

_NETWORK: Final = "10.77"
_HUB: Final = 254
MAX_HOSTS: Final = 64
# Bytes of a switch port's queue, and of a burst.
QUEUE: Final = 256 << 10
_BURST: Final = 128 << 10
# linux/sockios.h, linux/ethtool.h: segmentation and receive offload. With offload, one lost packet is up to 64 KB.
_SIOCETHTOOL: Final = 0x8946
_OFFLOADS: Final = (0x1F, 0x24, 0x2C)  # ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO


@dataclass(slots=True)
class Bridge:
    """A bridged network. Settings hold until they are changed."""

    hub: LabHost
    hosts: Sequence[LabHost]
    rails: int = 1
    _cut: dict[int, bool] = field(default_factory=dict)  # host -> whether it is cut from the hub, too
    _loss: dict[int, float] = field(default_factory=dict)  # host -> share of packets lost, each way

    def address(self, number: int, rail: int) -> str:
        """Return the address of host *number* on a rail."""
        return f"{_NETWORK}.{rail}.{number + 1}"

    def limit_bandwidth(self, number: int, megabits: float, queue: int = QUEUE, rail: int = 0) -> None:
        """Limit the link towards host *number* to *megabits* per second; what does not fit into *queue* bytes is
        dropped."""
        self.hub.run_command(
            "tc", "qdisc", "replace", "dev", _port(number, rail), "root", "tbf",
            "rate", f"{round(megabits * 1000)}kbit", "burst", str(_BURST), "limit", str(queue),
        )  # fmt: skip

    def remove_limit(self, number: int, rail: int = 0) -> None:
        """Remove the limit of host *number*."""
        self.hub.run_command("tc", "qdisc", "delete", "dev", _port(number, rail), "root")

    def set_cable(self, number: int, rail: int, *, plugged: bool) -> None:
        """Plug in or pull the cable of host *number* on a rail. Both ends keep their addresses."""
        self.hub.run_command("ip", "link", "set", _port(number, rail), "up" if plugged else "down")

    def received_bytes(self, number: int, rail: int) -> int:
        """Return the bytes that host *number* has received on a rail."""
        [link] = json.loads(self.hub.run_command("ip", "-json", "-stats", "link", "show", _port(number, rail)))
        return int(link["stats64"]["tx"]["bytes"])

    def drop_packets(self, number: int, share: float) -> None:
        """Drop this share (0 to 1, in thousandths) of all packets between host *number* and the others except the hub,
        each way."""
        self._loss[number] = share
        self._apply()

    def cut_host(self, number: int, hub: bool = True) -> None:
        """Cut host *number* from all others. hub: from the hub, too."""
        self._cut[number] = hub
        self._apply()

    def restore_links(self) -> None:
        """End all losses and cuts."""
        self._cut, self._loss = {}, {}
        self._apply()

    def set_offload(self, on: bool) -> None:
        """Switch segmentation and receive offload of hosts and ports."""
        for host in self.hosts:
            host.run_in_network(lambda: _set_offload(*(f"eth{rail}" for rail in range(self.rails)), on=on))
        ports = [port for number in range(len(self.hosts)) for port in self._ports(number)]
        self.hub.run_in_network(lambda: _set_offload(*ports, on=on))

    def _ports(self, number: int) -> list[str]:
        return [_port(number, rail) for rail in range(self.rails)]

    def _apply(self) -> None:
        forwarded, to_hub = [], []
        for number, hub in self._cut.items():
            for port in self._ports(number):
                forwarded += [f"iifname {port} drop", f"oifname {port} drop"]
                to_hub += [port] if hub else []
        for number, share in self._loss.items():
            thousandths = round(1000 * share)
            lost = f"numgen random mod 1000 < {thousandths} drop" if thousandths < 1000 else "drop"
            for port in self._ports(number):
                forwarded += [f"iifname {port} {lost}", f"oifname {port} {lost}"]
        chains = {
            "forward": forwarded,
            "input": [f"iifname {port} drop" for port in to_hub],
            "output": [f"oifname {port} drop" for port in to_hub],
        }
        lines = ["table bridge lab", "delete table bridge lab", "table bridge lab {"]
        for hook, rules in chains.items():
            lines += [f"chain {hook} {{", f"type filter hook {hook} priority 0; policy accept;", *rules, "}"]
        self.hub.run_command("nft", "-f", "-", text="\n".join([*lines, "}"]) + "\n")


@contextmanager
def bridge_network(hosts: int, rails: int = 1) -> Iterator[Bridge]:
    """Create a network of *hosts* hosts, at 10.77.0.1 and so on, and its hub at 10.77.0.254. With several rails, hosts
    and hub are at 10.77.1.1 and so on, too."""
    require_root()
    if not 1 <= hosts <= MAX_HOSTS:
        raise ValueError(f"{hosts} hosts: expected 1 to {MAX_HOSTS}")
    with ExitStack() as stack:
        hub = stack.enter_context(create_host("hub", f"{_NETWORK}.0.{_HUB}"))
        made = [
            stack.enter_context(create_host(f"node{number + 1}", f"{_NETWORK}.0.{number + 1}"))
            for number in range(hosts)
        ]
        bridge = Bridge(hub, made, rails)
        lines = ["link set lo up"]
        for rail in range(rails):
            lines += [
                f"link add lab{rail} type bridge forward_delay 0 mcast_snooping 0", f"link set lab{rail} up",
                f"addr add {_NETWORK}.{rail}.{_HUB}/24 dev lab{rail}",
            ]  # fmt: skip
            for number, host in enumerate(made):
                port = _port(number, rail)
                lines += [
                    f"link add {port} type veth peer name eth{rail} netns {host.pid}",
                    f"link set {port} master lab{rail} up",
                ]
        run_ip_batch(hub, lines)
        for number, host in enumerate(made):
            lines = ["link set lo up"]
            for rail in range(rails):
                lines += [f"addr add {bridge.address(number, rail)}/24 dev eth{rail}", f"link set eth{rail} up"]
            run_ip_batch(host, lines)
        yield bridge


def run_ip_batch(host: LabHost, lines: Sequence[str]) -> None:
    """Run a batch of `ip` commands on the host. Raises CachefsError."""
    host.run_command("ip", "-batch", "-", text="\n".join(lines) + "\n")


def _port(number: int, rail: int = 0) -> str:
    """Return the name of the bridge's end of a host's link."""
    return f"port{number + 1}" + (f"rail{rail}" if rail else "")


def _set_offload(*interfaces: str, on: bool) -> None:
    with socket.socket() as any_socket:
        for interface, command in product(interfaces, _OFFLOADS):
            value = array("I", [command, on])
            fcntl.ioctl(any_socket, _SIOCETHTOOL, struct.pack("16sQ16x", interface.encode(), value.buffer_info()[0]))
