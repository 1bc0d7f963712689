"""What the places say that a user looks at while a job is stuck: cachectl, the web page, the job's own stderr."""

import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from click.testing import CliRunner

from cachefs import __version__
from cachefs_tools import cachectl
from cachefs_tools.doctor import node
from tests.daemon import Daemon
from tests.waiting import until
from tests.warm_python import WarmPython

BIN = Path(sys.executable).parent
SCRIPT = Path(__file__).with_name("node") / "publishing" / "stuck_training.py"
# Seconds that a command or a page may take.
PATIENCE = 90.0


def until_found(look: Callable[[], str], wanted: str) -> str:
    """What is found, once it has the regular expression *wanted* in it."""
    return until(look, f"{wanted!r} in", is_right=lambda text: re.search(wanted, text))


class Job:
    """A training under `cachefs run`, whose output is kept."""

    def __init__(self, torch_jobs: WarmPython, daemon: Daemon, name: str, arguments: Sequence[str | Path]) -> None:
        self._lines: list[str] = []
        command = [BIN / "cachefs", "run", "--job", name, "--socket", daemon.socket, "--", sys.executable, *arguments]
        self.process = torch_jobs.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self._lines.extend(iter(self.process.stdout.readline, ""))

    def said(self) -> str:
        """All that it has printed by now."""
        return "".join(list(self._lines))

    def finish(self) -> str:
        """All that it has printed, once it has ended."""
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return self.said()

    def end(self) -> None:
        """It is over, whatever has happened."""
        self.process.kill()
        self.process.wait()


class Places:
    """The places of one node that tell of one job."""

    def __init__(self, daemon: Daemon, web_port: int, job: str) -> None:
        self._daemon = daemon
        self._port = web_port
        self._job = job

    def ctl(self, *arguments: str) -> str:
        """What cachectl prints. It runs in this process: one that is started takes 0.3 s of a processor."""
        command = ["--socket", str(self._daemon.socket), *arguments]
        return CliRunner(env={"COLUMNS": "250"}).invoke(cachectl.main, command).stdout

    def job_show(self) -> str:
        return self.ctl("job", "show", self._job)

    def top(self) -> str:
        return self.ctl("top", "--once", "--interval", "0.5")

    def doctor(self) -> str:
        """What `cachectl doctor` finds of the daemon. The command starts a process for each of its other checks."""
        facts = node.gather({"socket": str(self._daemon.socket)})
        return "\n".join(finding.found for finding in node.findings(facts, __version__, time.time()))

    def errors(self) -> str:
        return self.ctl("errors")

    def web(self) -> str:
        """What the page is made of: the notes of the node, and those of the job."""
        found: list[str] = []
        for what, of in (("overview", lambda view: view), (f"job?name={self._job}", lambda view: view["job"])):
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/{what}", timeout=PATIENCE) as answer:
                found += of(json.load(answer))["troubles"]
        return "\n".join(found)

    def all(self) -> dict[str, Callable[[], str]]:
        """By name: what asks the place."""
        return {
            "job show": self.job_show, "top": self.top, "web page": self.web, "errors": self.errors,
            "doctor": self.doctor,
        }  # fmt: skip
