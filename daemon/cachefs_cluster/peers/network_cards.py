"""The network cards of this node: which card has an address, and how far it is from this process's memory.

Linux tells the NUMA node of a card in /sys/class/net/CARD/device/numa_node, and the distances between NUMA nodes in
/sys/devices/system/node/node*/distance. Virtual interfaces have no device: the card below a VLAN is looked up, and the
distance of any other is unknown.
"""

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

# Seconds between two reads of the addresses: an address that is unknown may have come since.
_READ_SECONDS: Final = 5.0
# Most interfaces on top of each other that are followed down to a card.
_MAX_DEPTH: Final = 4


def card_addresses() -> Mapping[str, str]:
    """Return the names of this node's network cards by their addresses."""
    return {
        one.address.partition("%")[0]: name for name, addresses in psutil.net_if_addrs().items() for one in addresses
    }


@dataclass(frozen=True, slots=True)
class NetworkCard:
    """A network card of this node."""

    name: str
    # NUMA distance between the card and this process's buffers, as the kernel counts (10: the same node); 0 if it is
    # not known.
    distance: float = 0.0


class NetworkCards:
    """Finds cards by their addresses. Thread-safe."""

    def __init__(
        self,
        system: Path = Path("/sys"),
        read_addresses: Callable[[], Mapping[str, str]] = card_addresses,
        processors: Callable[[], Collection[int]] = lambda: os.sched_getaffinity(0),
    ) -> None:
        """system: where sysfs is. processors: those that this process may use."""
        self._system = system
        self._read_addresses = read_addresses
        self._processors = processors
        self._lock = threading.Lock()
        self._cards: dict[str, NetworkCard] = {}  # by address
        self._read_at = float("-inf")  # monotonic seconds

    def find_card(self, address: str) -> NetworkCard:
        """Return the card that has a local address. If none has it, the address stands for a card."""
        address = address.partition("%")[0]
        with self._lock:
            if address not in self._cards and time.monotonic() - self._read_at > _READ_SECONDS:
                self._read_cards()
            return self._cards.get(address) or NetworkCard(address)

    def _read_cards(self) -> None:
        names, self._read_at = self._read_addresses(), time.monotonic()
        cards = {name: NetworkCard(name, self._distance(name)) for name in set(names.values())}
        self._cards = {address: cards[name] for address, name in names.items()}

    def _distance(self, card: str) -> float:
        """Return the NUMA distance between the card and this process's buffers, or 0. The process receives on any
        processor that it may use, and the kernel takes the buffers from the node of that processor, so the distance is
        the mean over those processors."""
        try:
            return self._read_distance(card)
        except (OSError, ValueError, IndexError, ZeroDivisionError):  # the kernel has no NUMA, or hides it
            return 0.0

    def _read_distance(self, card: str) -> float:
        """Raises OSError, ValueError, IndexError, ZeroDivisionError where the kernel tells nothing."""
        nodes = self._system / "devices" / "system" / "node"
        node = int((self._device(card) / "numa_node").read_text())
        if node < 0:
            return 0.0
        online = sorted(_numbers((nodes / "online").read_text()))
        row = (nodes / f"node{node}" / "distance").read_text().split()
        distances = dict(zip(online, map(float, row), strict=True))
        mine = set(self._processors())
        counts = {each: len(_numbers((nodes / f"node{each}" / "cpulist").read_text()) & mine) for each in online}
        return sum(distances[each] * count for each, count in counts.items()) / sum(counts.values())

    def _device(self, card: str) -> Path:
        """Return the directory of the card's device. Raises OSError."""
        interface = self._system / "class" / "net" / card
        for _ in range(_MAX_DEPTH):
            if (interface / "device").exists():
                break
            below = [*interface.glob("lower_*")]
            if len(below) != 1:
                break
            interface = below[0]
        return interface / "device"


def _numbers(text: str) -> set[int]:
    """Return the numbers in a list of the kernel, such as 0-3,8. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
