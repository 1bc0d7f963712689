"""Warmups in the background: they are listed, watched and cancelled, and go on after a restart of the daemon."""

import functools
import http.server
import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachefs_tools.cachectl import main
from cachefs_tools.cachectl.display import size
from tests.cachectl import CACHECTL, cachectl, run_here
from tests.daemon import Daemon
from tests.waiting import until

FILES = 20
# Nothing fails while the gate is closed, also on a busy machine.
PATIENT = {"daemon": {"read_deadline": 120}, "origin": {"read_timeout": 120}}


class Gate(http.server.SimpleHTTPRequestHandler):
    """Gives the files of a directory away, but no data while the gate is closed."""

    opened = threading.Event()

    def do_GET(self) -> None:
        if "/data" in self.path:
            self.opened.wait(120)
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    tree = tmp_path / "tree"
    (tree / "data").mkdir(parents=True)
    for number in range(FILES):
        (tree / f"data/{number}").write_bytes(bytes([number]) * 1000)
    assert run_here(main, "cachectl", ["index", str(tree)]).returncode == 0
    Gate.opened.clear()
    handler = functools.partial(Gate, directory=str(tree))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        Gate.opened.set()
        server.shutdown()


def run(daemon: Daemon, *arguments: str, status: int = 0) -> str:
    done = cachectl(daemon.socket, *arguments)
    assert done.returncode == status, done.stderr
    return done.stdout or done.stderr


def listed(daemon: Daemon) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(daemon, "warmups", "--json"))["warmups"]
    return found


def test_from_the_beginning_to_the_end_over_a_restart(url: str, tmp_path: Path) -> None:
    with Daemon(tmp_path / "node", PATIENT) as daemon:
        daemon.add_dataset("web", url)
        assert "as warmup 1" in run(daemon, "warmup", "web", "--no-wait")
        assert "as warmup 2" in run(daemon, "warmup", "web", "data/3", "--no-wait")
        assert [(one["id"], one["dataset"], one["state"]) for one in listed(daemon)] == [
            (1, "web", "running"), (2, "web", "running"),
        ]  # fmt: skip
        assert "web: 0 of 1 blocks here, 0 B (cancelled)" in run(daemon, "warmups", "--cancel", "2")
        assert [one["state"] for one in listed(daemon)] == ["running", "cancelled"]
        assert "there is no warmup 7" in run(daemon, "warmups", "--cancel", "7", status=1)

        kept = daemon.home / "state/warmups.msgpack"
        until(lambda: kept.exists() and b"data/3" not in kept.read_bytes())
        daemon.kill9()
        daemon.start()
        assert [(one["dataset"], one["state"], one["blocks_total"]) for one in listed(daemon)] == [
            ("web", "running", FILES)
        ]

        Gate.opened.set()
        assert f"web: {FILES} of {FILES} blocks here" in run(daemon, "warmups", "--watch", "1")
        assert " done " in run(daemon, "warmups")
        until(lambda: kept.read_bytes() == b"\x90")


def test_progress_in_a_pipe_and_what_an_interrupted_command_says(url: str, tmp_path: Path) -> None:
    with Daemon(tmp_path / "node", PATIENT) as daemon:
        daemon.add_dataset("web", url)
        command = [CACHECTL, "warmup", "web", "--socket", daemon.socket]
        for watched in (False, True):
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
                assert process.stderr is not None
                assert process.stderr.readline() == f"warming web: 0.0 %, 0 B of {size(FILES * 1000)}\n"
                process.send_signal(signal.SIGINT)
                said = process.stderr.read()
                assert f"web: 0 of {FILES} blocks here, 0 B; the warmup " in said
                assert ("continues" if watched else "is cancelled") in said
                assert process.wait(60) == 130
            states = [one["state"] for one in listed(daemon)]
            assert states == (["cancelled", "running"] if watched else ["cancelled"])
            if not watched:
                run(daemon, "warmup", "web", "--no-wait")
                command = [CACHECTL, "warmups", "--watch", "2", "--socket", daemon.socket]
