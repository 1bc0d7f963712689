"""One side of `cachefs-bench peers`, a process on a host of the lab: serves blocks, or requests them.

    python -m cachefs_bench.peer_side give|ask|copy-give|copy-ask JSON

The JSON holds the parameters. Serving sides print a line of JSON and run until their input ends. Requesting sides read
lines of JSON, `["many", SECONDS]` or `["one by one", COUNT]`, and answer each with a line of JSON.
"""

import asyncio
import json
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from cachefs.block import block_key, content_id
from cachefs.messages import BlockRef
from cachefs_cluster.membership.membership import Listener
from cachefs_cluster.membership.view import ClusterView, NodeRecord, State
from cachefs_cluster.peers.client import PeerClient
from cachefs_cluster.peers.peer_requests import BlockRequest, PeerBlock, PeerResponse, RequestOptions
from cachefs_cluster.peers.server_process import PeerServers, ServerSettings
from cachefs_cluster.peers.tls import Certificates, TlsFiles
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.store.block_store import BlockToStore
from cachefs_daemon.store.storage import PlanningParts, Storage, StoreConfig
from cachefs_daemon.store.tier import TierConfig

CLUSTER: Final = "bench"
REQUESTER: Final = "a" * 16
# Bytes of different blocks on a side: more than a processor's cache.
_HELD_BYTES: Final = 256 << 20
_CHUNK: Final = 256 << 10
# Seconds at the begin of each turn that do not count, while the requests in flight grow.
RAMP_SECONDS: Final = 0.2


class _ConstantMembership:
    """A membership with a constant view."""

    def __init__(self, view: ClusterView) -> None:
        self.view = view

    def add_listener(self, callback: Listener) -> None: ...

    async def start(self) -> None: ...

    async def announce(self, state: State) -> None: ...

    async def refresh(self) -> None: ...

    def note_response(self, node_id: str, incarnation: str = "") -> None: ...

    def note_silence(self, node_id: str) -> None: ...

    def note_record(self, record: NodeRecord) -> None: ...

    async def leave(self) -> None: ...

    async def stop(self) -> None: ...


def side_record(number: int, host: str, port: int, *rails: str) -> NodeRecord:
    """Return the record of a side; 0 is the requesting one. rails: its further addresses."""
    node_id = f"{number:016x}" if number else REQUESTER
    return NodeRecord(node_id, node_id, f"node-{number}", host, port, port + 1, state="active", rails=rails)


def _view(me: NodeRecord, *others: NodeRecord) -> ClusterView:
    members = tuple(sorted((me, *others), key=lambda record: record.id))
    return ClusterView(1, me.id, members, tuple(record.id for record in members), "etcd")


def _key(number: int, size: int) -> bytes:
    return block_key(content_id(b"bench", b"%d" % number, size, size), 0)


def _count(size: int) -> int:
    return max(8, _HELD_BYTES // size)


def _tls(parameters: dict[str, Any]) -> TlsFiles | None:
    return TlsFiles(*map(Path, parameters["tls"])) if parameters["tls"] else None


async def _serve_blocks(parameters: dict[str, Any]) -> None:
    root, size = Path(parameters["root"]), parameters["size"]
    memory = TierConfig(root / "memory", 2 * _HELD_BYTES + (64 << 20), 64 << 20, "minio")
    storage = Storage(StoreConfig(root / "state", 4 << 20, memory, None), PlanningParts.empty())
    data = os.urandom(size)
    for number in range(_count(size)):
        storage.blocks.put_many([BlockToStore(_key(number, size), data)])
    storage.index.commit()
    links: list[socket.socket] = []

    async def adopt(link: socket.socket) -> None:
        links.append(link)  # no block is fetched

    me = side_record(parameters["number"], parameters["host"], 1)
    members = _ConstantMembership(_view(me, side_record(0, parameters["asker"], 1)))
    settings = ServerSettings(
        [(host, 0) for host in parameters["hosts"]],
        storage.index.path,
        {"memory": root / "memory"},
        _tls(parameters),
        0,
    )
    servers = PeerServers(CLUSTER, members, settings, adopt, ErrorLog())
    await servers.start()
    _print({"port": servers.port, "pids": servers.pids})
    await asyncio.to_thread(sys.stdin.read)
    await servers.stop()
    storage.close()


class _BlockRequester:
    def __init__(self, parameters: dict[str, Any]) -> None:
        self._loop, self._size = asyncio.get_running_loop(), parameters["size"]
        self._givers = [side_record(*giver) for giver in parameters["givers"]]
        files = _tls(parameters)
        members = _ConstantMembership(_view(side_record(0, parameters["asker"], 1), *self._givers))
        certificates = Certificates(files) if files else None
        self.client = PeerClient(CLUSTER, members, ErrorLog(), certificates, parameters["window"])
        self._keys = [_key(number, self._size) for number in range(_count(self._size))]
        self._refs = [BlockRef("0" * 32, number, 0) for number in range(len(self._keys))]
        self._outstanding: int = parameters["outstanding"]
        self._received = self._requested = self._left = 0
        self._until = 0.0
        self._done = asyncio.Event()
        self._failed: list[str] = []

    async def request_for_seconds(self, seconds: float) -> dict[str, float]:
        """Request blocks for *seconds*, with a constant number in flight."""
        self._until = self._loop.time() + RAMP_SECONDS + seconds
        self._left = self._outstanding
        self._done.clear()
        for number in range(self._outstanding):
            self._request_next(self._givers[number % len(self._givers)])
        await asyncio.sleep(RAMP_SECONDS)
        began, before, cpu = self._loop.time(), self._received, time.process_time()
        await asyncio.sleep(seconds)
        took, size = self._loop.time() - began, (self._received - before) * self._size
        cpu, window = time.process_time() - cpu, self.client.window
        await self._done.wait()
        self._check()
        return {"bytes_per_s": size / took, "cpu_s_per_gb": cpu / max(1, size) * 1e9, "window": window}

    async def request_one_by_one(self, count: int) -> dict[str, list[float]]:
        """Request *count* blocks one at a time. Returns the seconds of each."""
        times: list[float] = []
        for _ in range(count):
            one: asyncio.Future[PeerResponse] = self._loop.create_future()
            start = time.perf_counter()
            self._request(self._givers[0], one.set_result)
            response = await one
            times.append(time.perf_counter() - start)
            if not isinstance(response, PeerBlock):
                self._failed.append(str(response))
        self._check()
        return {"seconds": times}

    def _request(self, giver: NodeRecord, on_response: Callable[[PeerResponse], None]) -> None:
        at = self._requested * 7 % len(self._keys)
        self._requested += 1
        self.client.request_block(
            giver,
            BlockRequest(self._refs[at], self._keys[at], self._size),
            RequestOptions(self._loop.time() + 30),
            on_response,
        )

    def _request_next(self, giver: NodeRecord) -> None:
        self._request(giver, lambda response: self._handle_response(giver, response))

    def _handle_response(self, giver: NodeRecord, response: PeerResponse) -> None:
        if isinstance(response, PeerBlock):
            self._received += 1
        else:
            self._failed.append(str(response))
        if self._loop.time() < self._until and len(self._failed) < 10:
            self._request_next(giver)
            return
        self._left -= 1
        if not self._left:
            self._done.set()

    def _check(self) -> None:
        if self._failed:
            sys.exit(f"{len(self._failed)} blocks did not come: {self._failed[0]}")


async def _request_blocks(parameters: dict[str, Any]) -> None:
    asker = _BlockRequester(parameters)
    while (line := await asyncio.to_thread(sys.stdin.readline)).strip():
        what, amount = json.loads(line)
        _print(await (asker.request_for_seconds(amount) if what == "many" else asker.request_one_by_one(amount)))
    await asker.client.close()


def _serve_copy(parameters: dict[str, Any]) -> None:
    """Send the bytes of a file over TLS, on each connection."""
    files = _tls(parameters)
    assert files is not None
    context = Certificates(files).server_context
    path = Path(parameters["root"]) / "copied"
    path.write_bytes(os.urandom(64 << 20))
    listening = socket.create_server((parameters["host"], 0))
    _print({"port": listening.getsockname()[1], "pids": []})

    def serve(link: socket.socket) -> None:
        room, offset = memoryview(bytearray(_CHUNK)), 0
        with path.open("rb") as file, context.wrap_socket(link, server_side=True) as tls:
            while True:
                os.preadv(file.fileno(), [room], offset)
                offset = (offset + _CHUNK) % (64 << 20)
                try:
                    tls.sendall(room)
                except OSError:
                    return

    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    while True:
        link, _ = listening.accept()
        threading.Thread(target=serve, args=(link,), daemon=True).start()


def _request_copy(parameters: dict[str, Any]) -> None:
    """Receive on request, with a thread for each connection."""
    files = _tls(parameters)
    assert files is not None
    [(_, host, port)] = parameters["givers"]
    context = Certificates(files).client_context()
    counts = [0] * parameters["connections"]
    going = threading.Event()

    def receive(number: int) -> None:
        link = socket.create_connection((host, port))
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        session: Any = context.wrap_bio(incoming, outgoing)
        raw, room = memoryview(bytearray(_CHUNK)), memoryview(bytearray(_CHUNK))
        shaken = False
        while True:
            try:
                if shaken:
                    counts[number] += session.read(len(room), room)
                    continue
                session.do_handshake()
                shaken = True
            except ssl.SSLWantReadError:
                pass
            if outgoing.pending:
                link.sendall(outgoing.read())
            if not shaken or not incoming.pending:
                if shaken:
                    going.wait()
                count = link.recv_into(raw)
                incoming.write(raw[:count])

    for number in range(len(counts)):
        threading.Thread(target=receive, args=(number,), daemon=True).start()
    while (line := sys.stdin.readline()).strip():
        _, seconds = json.loads(line)
        going.set()
        time.sleep(RAMP_SECONDS)
        began, before, cpu = time.monotonic(), sum(counts), time.process_time()
        time.sleep(seconds)
        size, took = sum(counts) - before, time.monotonic() - began
        cpu = time.process_time() - cpu
        going.clear()
        _print({"bytes_per_s": size / took, "cpu_s_per_gb": cpu / max(1, size) * 1e9})
    os._exit(0)


def _print(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


def main() -> None:
    role, parameters = sys.argv[1], json.loads(sys.argv[2])
    if role == "give":
        asyncio.run(_serve_blocks(parameters))
    elif role == "ask":
        asyncio.run(_request_blocks(parameters))
    elif role == "copy-give":
        _serve_copy(parameters)
    else:
        _request_copy(parameters)


if __name__ == "__main__":
    main()
