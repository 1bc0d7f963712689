"""One side of `cachefs-bench peers`, a process on a host of the lab: it gives blocks, or asks for them.

    python -m cachefs_tools.bench.peer_side give|ask|copy-give|copy-ask JSON

What it is to do stands in the JSON; it prints one line of JSON, and *give* then runs until its input ends.
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
from statistics import median, quantiles
from typing import Any, Final

from cachefs_daemon.cluster.membership import NoMembership
from cachefs_daemon.cluster.view import ClusterView, NodeRecord
from cachefs_daemon.peers.answers import How, PeerAnswer, PeerBlock, Wanted
from cachefs_daemon.peers.client import PeerClient
from cachefs_daemon.peers.server_process import PeerServers, ServerPlaces
from cachefs_daemon.peers.tls import Certificates, TlsFiles
from cachefs_daemon.runtime.errorlog import ErrorLog
from cachefs_daemon.store.block_store import Put
from cachefs_daemon.store.storage import Foresight, Storage, StoreConfig
from cachefs_daemon.store.tier import TierConfig

from cachefs.block import block_key, content_id
from cachefs.messages import BlockRef

CLUSTER: Final = "bench"
ASKER: Final = "a" * 16
# Bytes of different blocks that one side has: more than fit into a processor's cache.
_HELD: Final = 256 << 20
_AT_ONCE: Final = 256 << 10


class _Members(NoMembership):
    """A view that does not change."""

    def __init__(self, view: ClusterView) -> None:
        self.view = view


def node(number: int, host: str, port: int) -> NodeRecord:
    """The record of a side; 0 is the one that asks."""
    node_id = f"{number:016x}" if number else ASKER
    return NodeRecord(node_id, node_id, f"node-{number}", host, port, port + 1, state="active")


def _view(me: NodeRecord, *others: NodeRecord) -> ClusterView:
    members = tuple(sorted((me, *others), key=lambda record: record.id))
    return ClusterView(1, me.id, members, tuple(record.id for record in members), "etcd")


def _key(number: int, size: int) -> bytes:
    return block_key(content_id(b"bench", b"%d" % number, size, size), 0)


def _count(size: int) -> int:
    return max(8, _HELD // size)


def _tls(given: dict[str, Any]) -> TlsFiles | None:
    return TlsFiles(*map(Path, given["tls"])) if given["tls"] else None


async def _give(given: dict[str, Any]) -> None:
    """Have blocks, and give them."""
    root, size = Path(given["root"]), given["size"]
    memory = TierConfig(root / "memory", 2 * _HELD + (64 << 20), 64 << 20, "minio")
    storage = Storage(StoreConfig(root / "state", 4 << 20, memory, None), Foresight.empty())
    data = os.urandom(size)
    for number in range(_count(size)):
        storage.blocks.put_many([Put(_key(number, size), data)])
    storage.index.commit()
    links: list[socket.socket] = []

    async def adopt(link: socket.socket) -> None:
        links.append(link)  # nothing is fetched

    me = node(given["number"], given["host"], 1)
    members = _Members(_view(me, node(0, given["asker"], 1)))
    places = ServerPlaces((given["host"], 0), storage.index.path, {"memory": root / "memory"}, _tls(given), 0)
    servers = PeerServers(CLUSTER, members, places, adopt, ErrorLog())
    await servers.start()
    _print({"port": servers.port, "pids": servers.pids})
    await asyncio.to_thread(sys.stdin.read)
    await servers.stop()
    storage.close()


async def _ask(given: dict[str, Any]) -> None:
    """Ask for blocks of all who give: so many at once for some seconds, and then one at a time."""
    loop, size = asyncio.get_running_loop(), given["size"]
    givers = [node(number, host, port) for number, host, port in given["givers"]]
    files = _tls(given)
    members = _Members(_view(node(0, given["asker"], 1), *givers))
    errors = ErrorLog()
    client = PeerClient(CLUSTER, members, errors, Certificates(files) if files else None)
    keys = [_key(number, size) for number in range(_count(size))]
    refs = [BlockRef("0" * 32, number, 0) for number in range(len(keys))]
    done = asyncio.Event()
    came, asked, failed = 0, 0, list[str]()
    until = loop.time() + given["warm"] + given["seconds"]

    def ask(giver: NodeRecord, answer: Callable[[PeerAnswer], None]) -> None:
        nonlocal asked
        at = asked * 7 % len(keys)
        asked += 1
        client.ask(giver, Wanted(refs[at], keys[at], size), How(loop.time() + 30), answer)

    def go_on(giver: NodeRecord, answer: PeerAnswer) -> None:
        nonlocal came
        if isinstance(answer, PeerBlock):
            came += 1
        else:
            failed.append(str(answer))
        if loop.time() < until and len(failed) < 10:
            ask(giver, lambda again: go_on(giver, again))
        else:
            done.set()

    for number in range(given["outstanding"]):
        giver = givers[number % len(givers)]
        ask(giver, lambda answer, giver=giver: go_on(giver, answer))  # type: ignore[misc]
    await asyncio.sleep(given["warm"])
    began, before, cpu = loop.time(), came, time.process_time()
    await asyncio.sleep(given["seconds"])
    rate = (came - before) * size / (loop.time() - began)
    cpu = (time.process_time() - cpu) / max(1, (came - before) * size) * 1e9
    window = client.window
    await done.wait()
    await asyncio.sleep(0.3)
    times: list[float] = []
    for _ in range(given["singles"]):
        one: asyncio.Future[PeerAnswer] = loop.create_future()
        start = time.perf_counter()
        ask(givers[0], one.set_result)
        await one
        times.append(time.perf_counter() - start)
    await client.close()
    if failed:
        sys.exit(f"{len(failed)} blocks did not come: {failed[0]}")
    singles = {"p50_us": median(times) * 1e6, "p99_us": quantiles(times, n=100)[98] * 1e6} if len(times) > 1 else {}
    _print({"bytes_per_s": rate, "cpu_s_per_gb": cpu, "window": window, **singles})


def _copy_give(given: dict[str, Any]) -> None:
    """Send the bytes of a file over TLS, on as many connections as come."""
    files = _tls(given)
    assert files is not None
    context = Certificates(files).server
    path = Path(given["root"]) / "copied"
    path.write_bytes(os.urandom(64 << 20))
    listening = socket.create_server((given["host"], 0))
    _print({"port": listening.getsockname()[1], "pids": []})

    def serve(link: socket.socket) -> None:
        room, offset = memoryview(bytearray(_AT_ONCE)), 0
        with path.open("rb") as file, context.wrap_socket(link, server_side=True) as tls:
            while True:
                os.preadv(file.fileno(), [room], offset)
                offset = (offset + _AT_ONCE) % (64 << 20)
                try:
                    tls.sendall(room)
                except OSError:
                    return

    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    while True:
        link, _ = listening.accept()
        threading.Thread(target=serve, args=(link,), daemon=True).start()


def _copy_ask(given: dict[str, Any]) -> None:
    """Receive what comes, with a thread for each connection."""
    files = _tls(given)
    assert files is not None
    [(_, host, port)] = given["givers"]
    context = Certificates(files).client()
    counts = [0] * given["connections"]

    def receive(number: int) -> None:
        link = socket.create_connection((host, port))
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        session: Any = context.wrap_bio(incoming, outgoing)
        raw, room = memoryview(bytearray(_AT_ONCE)), memoryview(bytearray(_AT_ONCE))
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
                count = link.recv_into(raw)
                incoming.write(raw[:count])

    for number in range(len(counts)):
        threading.Thread(target=receive, args=(number,), daemon=True).start()
    time.sleep(given["warm"])
    began, before, cpu = time.monotonic(), sum(counts), time.process_time()
    time.sleep(given["seconds"])
    size = sum(counts) - before
    cpu = (time.process_time() - cpu) / max(1, size) * 1e9
    _print({"bytes_per_s": size / (time.monotonic() - began), "cpu_s_per_gb": cpu})
    os._exit(0)


def _print(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


def main() -> None:
    role, given = sys.argv[1], json.loads(sys.argv[2])
    if role == "give":
        asyncio.run(_give(given))
    elif role == "ask":
        asyncio.run(_ask(given))
    elif role == "copy-give":
        _copy_give(given)
    else:
        _copy_ask(given)


if __name__ == "__main__":
    main()
