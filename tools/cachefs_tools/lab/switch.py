"""A network of hosts with a switch in user space between them, which delays what passes. Some kernels have no netem.

Each host and the hub have a TAP device, whose other end is held by one process: `python -m cachefs_tools.lab.switch`.
It reads frames, and writes each to the device of its destination, at once or after the delay of that pair. A frame is
whole up to 64 KB where offload is on: the header of virtio in front of it tells the receiver how to cut it. That brings
some gigabits a second. Commands come as JSON lines on its standard input; it answers each with a line.
"""

import fcntl
import heapq
import json
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from cachefs.errors import CachefsError
from cachefs_tools.lab.bridge import batch
from cachefs_tools.lab.host import Host, require_root, run, started_host
from cachefs_tools.scratch_node import WITH_PARENT, wait

_NETWORK: Final = "10.78.0"
# linux/if_tun.h
_TUNSETIFF: Final = 0x400454CA
_TUNSETOFFLOAD: Final = 0x400454D0
_TUNSETVNETHDRSZ: Final = 0x400454D8
_TAP: Final = 0x0002 | 0x1000 | 0x4000  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
_ANY_SEGMENTS: Final = 0x01 | 0x02 | 0x04  # TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6
_HEADER: Final = 10  # bytes of the header of virtio
_MOST: Final = _HEADER + 65_550
# Frames that are read of one device before the next one has its turn.
_TURN: Final = 32
# Frames that are under way at most; more are dropped, as a switch does.
_HELD: Final = 20_000
_MAC: Final = bytes((2, 0x78, 0, 0, 0))


class Switch:
    """The network, seen from the process that made it. Hosts count from 0."""

    def __init__(self, hub: Host, hosts: Sequence[Host], process: subprocess.Popen[bytes]) -> None:
        self.hub = hub
        self.hosts = hosts
        self._process = process

    def delay(self, seconds: float) -> None:
        """What one host sends to another takes so much longer. The hub is as near as before."""
        self._tell({"delay": seconds})

    def cut(self, number: int, hub: bool = True) -> None:
        """Nothing reaches host *number*, and nothing comes from it. hub: not even the hub."""
        self._tell({"cut": number + 1, "hub": hub})

    def heal(self) -> None:
        """Nothing is cut any more."""
        self._tell({"cut": 0, "hub": False})

    def _tell(self, command: dict[str, float]) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # the missing answer says it
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise CachefsError("the lab's switch has ended")


@contextmanager
def switched_network(hosts: int) -> Iterator[Switch]:
    """A network of so many hosts, at 10.78.0.1 and so on; the hub is the one behind the last."""
    require_root()
    with ExitStack() as stack:
        made = [
            stack.enter_context(started_host(f"node{number}", f"{_NETWORK}.{number}")) for number in range(1, hosts + 1)
        ]
        hub = stack.enter_context(started_host("hub", f"{_NETWORK}.{hosts + 1}"))
        # In a network of its own the devices have no other names beside them before they are handed out.
        room = stack.enter_context(started_host("switch", ""))
        everybody = [*made, hub]
        process = subprocess.Popen(
            [*WITH_PARENT, *room.enter, sys.executable, "-m", "cachefs_tools.lab.switch", str(len(everybody))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        stack.callback(_end, process)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise CachefsError("the lab's switch does not start; is there a /dev/net/tun?")
        for number, host in enumerate(everybody, 1):
            run([*room.enter, "ip", "link", "set", f"tap{number}", "netns", str(host.pid), "name", "eth0"])
            mac = (_MAC + bytes((number,))).hex(":")
            batch(host, [
                "link set lo up", f"link set eth0 address {mac}", f"addr add {host.address}/24 dev eth0",
                "link set eth0 txqueuelen 2000 up",
            ])  # fmt: skip
        yield Switch(hub, made, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    wait(process)


# --- the process ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _State:
    """What is set now. Hosts count from 1; the hub is the last."""

    last: int
    delay: float = 0.0
    cut: int = 0  # the host that is cut off; 0: none
    hub: bool = False  # it is cut off from the hub, too

    def passes(self, source: int, target: int) -> bool:
        if self.cut not in (source, target) or not self.cut:
            return True
        return self.last in (source, target) and not self.hub

    def seconds(self, source: int, target: int) -> float:
        return 0.0 if self.last in (source, target) else self.delay


def _serve(count: int) -> None:
    """Pass frames on until the standard input ends."""
    devices = {_open(f"tap{number}"): number for number in range(1, count + 1)}
    ends = {number: device for device, number in devices.items()}
    state = _State(count)
    late: list[tuple[float, int, int, bytes]] = []  # when it is due, its number, to whom, the frame
    passed = 0
    poller = select.epoll()
    for device in (*devices, sys.stdin.fileno()):
        poller.register(device, select.EPOLLIN)
    _say("ready")
    while True:
        _wait_for(poller, late)
        for ready, _ in poller.poll(0):
            if ready == sys.stdin.fileno():
                line = sys.stdin.buffer.readline()
                if not line:
                    return
                for name, value in json.loads(line).items():
                    setattr(state, name, value)
                _say("done")
                continue
            source = devices[ready]
            for frame in _frames(ready):
                for target in _targets(frame, source, count):
                    if not state.passes(source, target):
                        continue
                    seconds = state.seconds(source, target)
                    if not seconds:
                        _write(ends[target], frame)
                    elif len(late) < _HELD:
                        passed += 1
                        heapq.heappush(late, (time.monotonic() + seconds, passed, target, frame))
        while late and late[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(late)
            _write(ends[target], frame)


def _wait_for(poller: select.epoll, late: list[tuple[float, int, int, bytes]]) -> None:
    """Wait until a device is ready or a frame is due. epoll has whole milliseconds only, select has not."""
    if late:
        select.select([poller.fileno()], [], [], max(0.0, late[0][0] - time.monotonic()))
    else:
        select.select([poller.fileno()], [], [])


def _open(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP))
    fcntl.ioctl(device, _TUNSETVNETHDRSZ, struct.pack("i", _HEADER))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _ANY_SEGMENTS)
    return device


def _frames(device: int) -> Iterator[bytes]:
    """What is there to read, up to a turn's number."""
    for _ in range(_TURN):
        try:
            yield os.read(device, _MOST)
        except OSError:  # nothing, or the device is not up yet
            return


def _targets(frame: bytes, source: int, count: int) -> Sequence[int]:
    """To whom a frame goes: by the last byte of its address, or to everybody else."""
    address = frame[_HEADER : _HEADER + 6]
    if address[:-1] == _MAC and 1 <= address[-1] <= count:
        return (address[-1],)
    return [number for number in range(1, count + 1) if number != source] if address[:1] == b"\xff" else ()


def _write(device: int, frame: bytes) -> None:
    with suppress(OSError):  # its queue is full, or it is not up: the frame is lost
        os.write(device, frame)


def _say(line: str) -> None:
    os.write(sys.stdout.fileno(), line.encode() + b"\n")


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
