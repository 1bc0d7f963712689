"""A network of hosts with a switch in user space, which delays frames: some kernels have no netem.

Each host and the hub have a TAP device, whose other end is held by one process: `python -m cachefs_bench.lab.switch`.
It reads frames, and writes each to the device of its destination, at once or after the delay of that pair. With
offload, frames are up to 64 KB, and a virtio header tells the receiver how to cut them, which allows some gigabits per
second. Commands are JSON lines on its standard input; each is answered by a line.
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
from cachefs_bench.lab.bridge import run_ip_batch
from cachefs_bench.lab.host import LabHost, create_host, require_root, run_command
from cachefs_tools.child_programs import KILL_WITH_PARENT, wait_or_kill

_NETWORK: Final = "10.78.0"
# linux/if_tun.h
_TUNSETIFF: Final = 0x400454CA
_TUNSETOFFLOAD: Final = 0x400454D0
_TUNSETVNETHDRSZ: Final = 0x400454D8
_TAP: Final = 0x0002 | 0x1000 | 0x4000  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
_ANY_SEGMENTS: Final = 0x01 | 0x02 | 0x04  # TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6
_HEADER: Final = 10  # bytes of the header of virtio
_MAX_FRAME: Final = _HEADER + 65_550
# Frames read from one device before the next one has its turn.
_FRAMES_PER_TURN: Final = 32
# Most frames in flight; more are dropped, as by a switch.
_MAX_DELAYED: Final = 20_000
_MAC: Final = bytes((2, 0x78, 0, 0, 0))


class LabSwitch:
    """The network, in the process that created it. Hosts count from 0."""

    def __init__(self, hub: LabHost, hosts: Sequence[LabHost], process: subprocess.Popen[bytes]) -> None:
        self.hub = hub
        self.hosts = hosts
        self._process = process

    def delay_frames(self, seconds: float) -> None:
        """Delay frames between hosts by *seconds*. Frames from and to the hub are not delayed."""
        self._send_command({"delay": seconds})

    def cut_host(self, number: int, hub: bool = True) -> None:
        """Cut host *number* from all others. hub: from the hub, too."""
        self._send_command({"cut": number + 1, "hub": hub})

    def restore_links(self) -> None:
        """End all cuts."""
        self._send_command({"cut": 0, "hub": False})

    def _send_command(self, command: dict[str, float]) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # reported by the missing answer
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise CachefsError("the lab's switch has ended")


@contextmanager
def switched_network(hosts: int) -> Iterator[LabSwitch]:
    """Create a network of *hosts* hosts, at 10.78.0.1 and so on; the hub has the next address."""
    require_root()
    with ExitStack() as stack:
        made = [
            stack.enter_context(create_host(f"node{number}", f"{_NETWORK}.{number}")) for number in range(1, hosts + 1)
        ]
        hub = stack.enter_context(create_host("hub", f"{_NETWORK}.{hosts + 1}"))
        # In a namespace of its own, the devices' names are free until they are handed out.
        switch_host = stack.enter_context(create_host("switch", ""))
        all_hosts = [*made, hub]
        process = subprocess.Popen(
            [*KILL_WITH_PARENT, *switch_host.enter_command, sys.executable, "-m", "cachefs_bench.lab.switch",
             str(len(all_hosts))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        stack.callback(_end, process)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise CachefsError("the lab's switch does not start; is there a /dev/net/tun?")
        for number, host in enumerate(all_hosts, 1):
            run_command(
                [
                    *switch_host.enter_command,
                    "ip",
                    "link",
                    "set",
                    f"tap{number}",
                    "netns",
                    str(host.pid),
                    "name",
                    "eth0",
                ]
            )
            mac = (_MAC + bytes((number,))).hex(":")
            run_ip_batch(host, [
                "link set lo up", f"link set eth0 address {mac}", f"addr add {host.address}/24 dev eth0",
                "link set eth0 txqueuelen 2000 up",
            ])  # fmt: skip
        yield LabSwitch(hub, made, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    wait_or_kill(process)


# --- the process ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _SwitchState:
    """Current settings. Hosts count from 1; the hub is the last."""

    last: int
    delay: float = 0.0
    cut: int = 0  # the host that is cut off; 0: none
    hub: bool = False  # whether it is cut off from the hub, too

    def can_pass(self, source: int, target: int) -> bool:
        if self.cut not in (source, target) or not self.cut:
            return True
        return self.last in (source, target) and not self.hub

    def seconds(self, source: int, target: int) -> float:
        return 0.0 if self.last in (source, target) else self.delay


def _serve(count: int) -> None:
    devices = {_open(f"tap{number}"): number for number in range(1, count + 1)}
    ends = {number: device for device, number in devices.items()}
    state = _SwitchState(count)
    late: list[tuple[float, int, int, bytes]] = []  # due time, sequence number, target, frame
    passed = 0
    poller = select.epoll()
    for device in (*devices, sys.stdin.fileno()):
        poller.register(device, select.EPOLLIN)
    _write_line("ready")
    while True:
        _wait_for(poller, late)
        for ready, _ in poller.poll(0):
            if ready == sys.stdin.fileno():
                line = sys.stdin.buffer.readline()
                if not line:
                    return
                for name, value in json.loads(line).items():
                    setattr(state, name, value)
                _write_line("done")
                continue
            source = devices[ready]
            for frame in _frames(ready):
                for target in _targets(frame, source, count):
                    if not state.can_pass(source, target):
                        continue
                    seconds = state.seconds(source, target)
                    if not seconds:
                        _write(ends[target], frame)
                    elif len(late) < _MAX_DELAYED:
                        passed += 1
                        heapq.heappush(late, (time.monotonic() + seconds, passed, target, frame))
        while late and late[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(late)
            _write(ends[target], frame)


def _wait_for(poller: select.epoll, late: list[tuple[float, int, int, bytes]]) -> None:
    """Wait until a device is ready or a frame is due, with select: epoll has a resolution of milliseconds."""
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
    """Yield available frames, up to _FRAMES_PER_TURN."""
    for _ in range(_FRAMES_PER_TURN):
        try:
            yield os.read(device, _MAX_FRAME)
        except OSError:  # nothing to read, or the device is not up yet
            return


def _targets(frame: bytes, source: int, count: int) -> Sequence[int]:
    """Return a frame's targets: by the last byte of its address, or all others."""
    address = frame[_HEADER : _HEADER + 6]
    if address[:-1] == _MAC and 1 <= address[-1] <= count:
        return (address[-1],)
    return [number for number in range(1, count + 1) if number != source] if address[:1] == b"\xff" else ()


def _write(device: int, frame: bytes) -> None:
    with suppress(OSError):  # queue full or device down: the frame is lost
        os.write(device, frame)


def _write_line(line: str) -> None:
    os.write(sys.stdout.fileno(), line.encode() + b"\n")


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
