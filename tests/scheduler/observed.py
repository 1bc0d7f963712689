"""Daemons that a scheduler may look at and give orders, each the only node of a cluster of its own."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import requests

from cachefs.observe_messages import (
    COMMAND_PATH,
    OBSERVER_HEADER,
    REPORT_PATH,
    NodeCommand,
    NodeCommandResult,
    NodeReport,
    SnapshotReport,
)
from cachefs_bench.lab.ports import free_ports
from tests.daemon import Daemon

SECONDS = 60.0
LOOKER, SCHEDULER = "watcher", "sched1"


class Observed:
    """A daemon that runs."""

    def __init__(self, daemon: Daemon, name: str, port: int) -> None:
        self.daemon = daemon
        self.name = name
        self.address = f"127.0.0.1:{port}"  # as in cluster.listen; the control endpoint has the next port
        self._url = f"http://127.0.0.1:{port + 1}"

    def get(self, path: str, who: str = LOOKER, **query: object) -> requests.Response:
        params = {key: str(value) for key, value in query.items()}
        return requests.get(self._url + path, headers={OBSERVER_HEADER: who}, params=params, timeout=SECONDS)

    def report(self, known: NodeReport | None = None, wait: float = 20.0) -> NodeReport:
        """What it says, or what is new since *known*."""
        query = {"after": known.version, "instance": known.instance} if known is not None else {}
        answer = self.get(REPORT_PATH, wait=wait, **query)
        assert answer.status_code == 200, answer.text
        return msgspec.msgpack.decode(answer.content, type=NodeReport)

    def post(self, path: str, order: NodeCommand | bytes, who: str = SCHEDULER) -> requests.Response:
        body = order if isinstance(order, bytes) else msgspec.msgpack.encode(order)
        return requests.post(self._url + path, data=body, headers={OBSERVER_HEADER: who}, timeout=SECONDS)

    def order(self, order: NodeCommand, who: str = SCHEDULER) -> NodeCommandResult:
        answer = self.post(COMMAND_PATH, order, who)
        assert answer.status_code == 200, answer.text
        return msgspec.msgpack.decode(answer.content, type=NodeCommandResult)

    def until(self, true: Any, known: NodeReport | None = None) -> NodeReport:
        """The first report for which *true* holds; what was said of snapshots before holds until it changes."""
        snapshots: dict[str, SnapshotReport] = {}
        for _ in range(60):
            known = self.report(known)
            if known.full:
                snapshots.clear()
            snapshots.update((one.id, one) for one in known.snapshots)
            whole = msgspec.structs.replace(known, snapshots=list(snapshots.values()))
            if true(whole):
                return whole
        raise AssertionError(f"not within 60 reports; the last: {whole}")


@contextmanager
def observed(home: Path, name: str = "node1", overrides: Mapping[str, Any] | None = None) -> Iterator[Observed]:
    port = free_ports(2)[0]
    section = {
        "membership": "static", "name": name, "listen": f"127.0.0.1:{port}", "nodes": [f"{name}=127.0.0.1:{port}"],
        "observers": [LOOKER], "schedulers": [SCHEDULER],
    }  # fmt: skip
    with Daemon(home, {"cluster": section, **(overrides or {})}) as daemon:
        yield Observed(daemon, name, port)


def made_files(directory: Path, count: int, size: int = 10_000) -> int:
    """So many files; returns their bytes."""
    for number in range(count):
        path = directory / f"{number % 10}" / f"{number:05}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    return count * size
