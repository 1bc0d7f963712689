"""A real cachefs-scheduler process."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cachefs.errors import DaemonUnavailable
from cachefs.messages import Message
from cachefs.scheduling_messages import NODES_PATH, STATUS_PATH, NodesStatus, SchedulerStatus
from cachefs_tools.cachectl.sched import SchedulerClient
from tests.scheduler.observed import SCHEDULER
from tests.waiting import until
from tests.warm_python import warm

COMMAND = Path(sys.executable).with_name("cachefs-scheduler")
SECONDS = 60.0


MODULE = "cachefs_scheduler.cli"


class Nothing(Message, frozen=True):
    """The answer to what is only told."""


class Scheduler:
    """A service that runs from the start of a `with` block, and may be killed and started again."""

    def __init__(self, home: Path, nodes: Sequence[str], sections: Mapping[str, Mapping[str, Any]]) -> None:
        home.mkdir(exist_ok=True)
        self.socket = home / "s"
        self.log = home / "log"
        self.config = home / "cachefs-scheduler.toml"
        self.process: subprocess.Popen[str] | None = None
        given: dict[str, dict[str, Any]] = {
            "service": {"socket": str(self.socket), "state_dir": str(home / "state"), "log_level": "debug"},
            "cluster": {"nodes": list(nodes), "name": SCHEDULER},
        }
        for name, values in sections.items():
            given[name] = {**given.get(name, {}), **values}
        lines = [line for name, values in given.items() for line in (f"[{name}]", *_lines(values))]
        self.config.write_text("\n".join(lines) + "\n")
        self.client = SchedulerClient(str(self.socket))

    def start(self) -> None:
        with self.log.open("ab") as log:
            command = ["setpriv", "--pdeathsig=KILL", sys.executable, COMMAND, "--config", self.config]
            self.process = warm(MODULE).start(command, stdout=log, stderr=log)
        self.until(lambda: self.status() is not None)

    def kill(self) -> None:
        """It ends without a word."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(SECONDS)

    def status(self) -> SchedulerStatus | None:
        """None: it does not answer yet."""
        try:
            return self.client.get(STATUS_PATH, SchedulerStatus)
        except DaemonUnavailable:
            return None

    def held(self, node: str, dataset: str = "set") -> float:
        """The part of a dataset that it knows a node to have."""
        found = {one.name: one for one in self.client.get(NODES_PATH, NodesStatus).nodes}
        parts = found[node].datasets if node in found else []
        return next((part.bytes / part.total for part in parts if part.dataset == dataset), 0.0)

    def until(self, true: Any) -> None:
        """Wait until it holds. Raises AssertionError with the end of the log where it never does."""

        def holds() -> bool:
            assert self.process is None or self.process.poll() is None, self.log.read_text()[-3000:]
            return bool(true())

        until(holds, lambda: self.log.read_text()[-3000:])


@contextmanager
def scheduler(
    home: Path, nodes: Sequence[str], sections: Mapping[str, Mapping[str, Any]] | None = None
) -> Iterator[Scheduler]:
    running = Scheduler(home, nodes, sections or {})
    try:
        running.start()
        yield running
    finally:
        running.kill()


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in values.items()]
