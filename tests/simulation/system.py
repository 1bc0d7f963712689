"""What the product's modules get in place of the operating system: sockets, threads, processes and clocks."""

import contextlib
import contextvars
import itertools
import os
import queue
import random
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import aiohttp.connector
import greenlet

from cachefs_cluster.membership import last_known
from cachefs_cluster.peers import (
    connecting,
    connection,
    daemon_fetch_client,
    heartbeats,
    request_server,
    server,
    server_process,
    wire,
)
from cachefs_daemon.fetch import fetcher
from tests.simulation import loop as simulated
from tests.simulation.loop import OUTSIDE, PROCESS, Process, SimulatedLoop, running_loop
from tests.simulation.network import End, Listener, Network, Poll, Transport, WakeUp
from tests.virtual_time import MONOTONIC, WALL

# Seconds that a process needs to start.
START_SECONDS = 0.05


class Machine(SimulatedLoop):
    """The event loop of all machines of a simulation, with the sockets of their network."""

    def __init__(self, seed: int, limit: float, trace: Callable[..., None]) -> None:
        super().__init__(seed, limit)
        self.network = Network(self, random.Random(seed ^ 0x5EED), trace)
        self._readers: dict[End, Callable[[], None]] = {}

    # --- sockets --------------------------------------------------------------------------------------------------

    def add_reader(self, end: Any, callback: Any, *arguments: Any) -> None:  # type: ignore[override]
        """Call *callback* as long as the end is readable."""
        if not isinstance(end, End):
            super().add_reader(end, callback, *arguments)
            return
        self.remove_reader(end)
        context = contextvars.copy_context()
        is_scheduled = False

        def look_soon() -> None:
            nonlocal is_scheduled
            if not is_scheduled and self._readers.get(end) is look_soon:
                is_scheduled = True
                self.call_soon(look, context=context)

        def look() -> None:
            nonlocal is_scheduled
            is_scheduled = False
            if self._readers.get(end) is look_soon and end.is_readable:
                callback(*arguments)
                if end.is_readable:
                    look_soon()

        self._readers[end] = look_soon
        end.watchers.add(look_soon)
        if end.is_readable:
            look_soon()

    def remove_reader(self, end: Any) -> bool:  # type: ignore[override]
        if not isinstance(end, End):
            return bool(super().remove_reader(end))
        watcher = self._readers.pop(end, None)
        if watcher is not None:
            end.watchers.discard(watcher)
        return watcher is not None

    def add_writer(self, end: Any, callback: Any, *arguments: Any) -> None:  # type: ignore[override]
        context = contextvars.copy_context()
        end.when_writable(lambda _: self.call_soon(callback, *arguments, context=context) and None)

    def remove_writer(self, end: Any) -> bool:  # type: ignore[override]
        return False

    async def connect_accepted_socket(self, factory: Any, sock: Any, **_: Any) -> Any:  # type: ignore[override]
        return self._begin(factory, sock)

    async def create_connection(  # type: ignore[override]
        self, factory: Any, host: Any = None, port: Any = None, *, sock: Any = None, **_: Any
    ) -> Any:
        return self._begin(factory, sock if sock is not None else await self.network.connected((host, port)))

    async def create_server(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:  # type: ignore[override]
        process = PROCESS.get()
        assert process is not None
        listener = Listener(self.network, process, (host, port))
        listener.on_connection = lambda end: self._begin(factory, end) and None
        listener.listen()
        return listener

    def _begin(self, factory: Any, end: End) -> tuple[Transport, Any]:
        protocol = factory()
        transport = Transport(end, protocol)
        transport.begin()
        return transport, protocol


class _Child:
    """Stands in for `subprocess.Popen` of a peer server."""

    def __init__(self, command: Sequence[str], pass_fds: Sequence[int], **_: Any) -> None:
        loop = running_loop()
        assert isinstance(loop, Machine)
        parent = PROCESS.get()
        assert parent is not None
        options = dict(itertools.pairwise(command))
        self.pid = int(options["--pipe"])
        self.returncode: int | None = None
        self._process = Process(loop, parent.host, clock_offset=parent.clock_offset)
        parent.on_end.append(self._process.kill)
        self._process.on_end.append(lambda: self._ended(-9))
        listening = loop.network.by_number[int(options["--listening"])]
        ends = [loop.network.by_number[int(options[name])] for name in ("--pipe", "--fetch")]
        for end in ends:
            assert isinstance(end, End)
            end.references += 1
            end.adopt(self._process)
            end.timeout = None
        self._process.context.copy().run(loop.call_later, START_SECONDS, loop.spawn, self._run, listening, *ends)

    def _run(self, listening: Any, pipe: Any, link: Any) -> None:
        if not self._process.is_alive:
            return
        with contextlib.suppress(greenlet.GreenletExit):
            server.open_server([listening], pipe, link, (Path("index"), {}), lambda: None).serve()
        self._process.kill()

    def _ended(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        OUTSIDE.copy().run(self._process.kill)


def _exit(code: int) -> None:
    """End the process whose thread calls."""
    process = PROCESS.get()
    assert process is not None
    running_loop().call_soon(process.kill, context=OUTSIDE)
    raise greenlet.GreenletExit


def _network() -> Network:
    loop = running_loop()
    assert isinstance(loop, Machine)
    return loop.network


async def _open_socket(host: str, port: int, _: object) -> End:
    return await _network().connected((host, port))


def _socketpair() -> tuple[End, End]:
    process = PROCESS.get()
    return _network().pair(process, process)


def _bind_socket(address: tuple[str, int], **_: Any) -> Listener:
    process = PROCESS.get()
    assert process is not None
    return Listener(_network(), process, address)


def _eventfd(_: int, __: int = 0) -> int:
    return WakeUp(_network()).serial


def _eventfd_write(number: int, _: int) -> None:
    thing = _network().by_number[number]
    assert isinstance(thing, WakeUp)
    thing.write()


async def _start_connection(addr_infos: Sequence[Any], **_: Any) -> End:
    return await _network().connected(tuple(addr_infos[0][4][:2]))


class _Like:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Files:
    """The small files of all nodes, by host."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def save(self, state_dir: Path, known: Any) -> None:
        self.known[str(state_dir)] = known

    def load(self, state_dir: Path, me: str) -> Any:
        known = self.known.get(str(state_dir))
        return (
            None
            if known is None
            else (last_known.Ring(known.epoch, known.ring), {record.id: record for record in known.records})
        )


@contextlib.contextmanager
def in_place(loop: Machine, seed: int, outlet: Callable[..., Any]) -> Iterator[None]:
    """Have the product's modules use the machine's sockets, threads, processes and clocks. outlet: makes what peer
    servers find blocks with."""
    threads = SimpleNamespace(
        Thread=simulated.Thread, Lock=simulated.Lock, Event=simulated.Event, stack_size=lambda _: None
    )
    polls = _Like(
        select,
        poll=lambda: Poll(loop.network, in_milliseconds=True),
        epoll=lambda: Poll(loop.network, in_milliseconds=False),
    )
    files = Files()

    def wall_clock() -> float:
        process = PROCESS.get()
        return WALL + loop.now - MONOTONIC + (process.clock_offset if process is not None else 0.0)

    replaced: list[tuple[Any, str, Any]] = [
        (server, "threading", threads),
        (server, "select", polls),
        (server, "os", _Like(os, _exit=_exit)),
        (server, "BlockSender", outlet),
        (heartbeats, "threading", threads),
        (daemon_fetch_client, "threading", threads),
        (request_server, "queue", _Like(queue, SimpleQueue=simulated.SimpleQueue)),
        (wire, "select", polls),
        (connection, "threading", threads),
        (connection, "select", polls),
        (connection, "os", _Like(os, eventfd=_eventfd, eventfd_write=_eventfd_write, close=lambda _: None)),
        (connecting, "_open_socket", _open_socket),
        (server_process, "socket", _Like(socket, socketpair=_socketpair)),
        (server_process, "subprocess", _Like(subprocess, Popen=_Child)),
        (server_process, "_bind_socket", _bind_socket),
        (server_process, "_processors", lambda: 1),
        (fetcher, "count_disk_waits", lambda: 0),
        (aiohttp.connector.aiohappyeyeballs, "start_connection", _start_connection),
        (last_known, "save_last_known", files.save),
        (last_known, "load_last_known", files.load),
        (time, "monotonic", loop.time),
        (time, "time", wall_clock),
        (time, "sleep", loop.sleep),
    ]
    before = random.getstate()
    random.seed(seed)
    try:
        with contextlib.ExitStack() as stack:
            for module, name, value in replaced:
                stack.enter_context(mock.patch.object(module, name, value))
            yield
    finally:
        random.setstate(before)
