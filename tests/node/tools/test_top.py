"""`cachectl top`, `status` and the like in a real terminal of 80 x 24, with a real daemon."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.job_messages import JobProgress, JobPublication
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.rpc import JOB_PROGRESS, JOB_PUBLISH
from tests.daemon import Daemon, shared_daemon
from tests.node.daemon.test_jobs import write_files
from tests.node.tools.test_cachectl import SMALL
from tests.terminal import Terminal

CACHECTL = Path(sys.executable).with_name("cachectl")
# A sequence that sets another colour than the terminal's own.
COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:[34][0-8]|9[0-7]|10[0-7])[;m]")
DATASET = "clairvoyant-images"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("node"), SMALL) as running:
        yield running


@pytest.fixture
def daemon(request: pytest.FixtureRequest, running: Daemon, tmp_path: Path) -> Iterator[Daemon]:
    write_files(tmp_path / "origin", 60, size=1000)
    with shared_daemon(request, lambda: running, lambda: Daemon(tmp_path / "node", SMALL)) as daemon:
        view = daemon.add_dataset(DATASET, f"file://{tmp_path}/origin")
        daemon.report(mount="m", spec=DATASET, counters={"requests": 10, "read": 5})
        spec = SamplerSpec(kind="sequential", size=60, epochs=2)
        publish(daemon, spec)
        daemon.read(view, sorted(path.name for path in (tmp_path / "origin").iterdir())[0])
        yield daemon


def publish(daemon: Daemon, spec: SamplerSpec) -> None:
    daemon.client.call(JOB_PUBLISH, JobPublication(job="train", dataset=DATASET, spec=spec, lease=600))
    daemon.client.call(JOB_PROGRESS, JobProgress(job="train", consumer="0", epoch=0, position=15))


def command(daemon: Daemon, *words: str) -> str:
    return " ".join(map(str, [CACHECTL, *words, "--socket", daemon.socket]))


def pid_of_top(terminal: Terminal) -> int:
    """The process of `cachectl top` in the terminal."""
    shell = terminal.shell()
    children = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
    return int(children[0])


def test_top_lives_through_restarts_and_leaves_the_terminal_as_it_was(daemon: Daemon, tmp_path: Path) -> None:
    with Terminal(tmp_path) as terminal:
        terminal.run(f"stty -a > {tmp_path}/before; echo begin")
        terminal.until_shows("\nbegin")
        terminal.run(f"{command(daemon, 'top', '--interval', '0.3')}; echo status $?; stty -a > {tmp_path}/after")
        screen = terminal.until_shows("> train", DATASET, "25 %", "alive", "q quit")
        assert "begin" not in screen
        assert len(screen.rstrip("\n").splitlines()) == 24

        daemon.kill9()
        terminal.until_shows("no daemon answers")
        terminal.press("?")
        terminal.until_shows("sort the list by its next column")
        terminal.press("Escape")
        daemon.start()
        publish(daemon, SamplerSpec(kind="sequential", size=60, epochs=2))
        terminal.until(lambda screen: "no daemon answers" not in screen and "> train" in screen)

        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            terminal.until_shows("the daemon")  # has not answered for so long, or did not answer in time
            terminal.press("Enter")
            terminal.until_shows("train: running")
            terminal.press("q")
            terminal.until_shows("begin", "status 0")
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        terminal.run("echo end")
        terminal.until_shows("\nend")
        assert (tmp_path / "after").read_text() == (tmp_path / "before").read_text()


def test_it_is_suspended_and_taken_up_again(daemon: Daemon, tmp_path: Path) -> None:
    with Terminal(tmp_path) as terminal:
        terminal.run("echo begin")
        terminal.run(command(daemon, "top"))
        terminal.until_shows("> train", "q quit")
        terminal.press("C-z")
        terminal.until_shows("begin", "Stopped")
        terminal.run("fg")
        terminal.until(lambda screen: "begin" not in screen and "> train" in screen and "q quit" in screen)
        terminal.press("q")
        terminal.until_shows("begin", "Stopped")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(daemon: Daemon, tmp_path: Path, number: signal.Signals) -> None:
    with Terminal(tmp_path) as terminal:
        terminal.run(f"stty -a > {tmp_path}/before; echo begin")
        terminal.until_shows("\nbegin")
        terminal.run(f"{command(daemon, 'top')}; echo status $?; stty -a > {tmp_path}/after; echo end")
        terminal.until_shows("> train")
        os.kill(pid_of_top(terminal), number)
        terminal.until_shows("begin", f"status {128 + number}", "\nend")
        assert (tmp_path / "after").read_text() == (tmp_path / "before").read_text()


@pytest.mark.parametrize("term", ["vt100", "linux"])
def test_without_colours_and_on_old_terminals(daemon: Daemon, tmp_path: Path, term: str) -> None:
    with Terminal(tmp_path, {"NO_COLOR": "1"}) as terminal:
        terminal.run(f"TERM={term} {command(daemon, 'top')}")
        screen = terminal.until_shows("> train", "###", "q quit")
        assert screen.isascii()
        coloured = terminal.screen(colours=True)
        assert COLOUR.search(coloured) is None, coloured
        terminal.press("C-c")
        terminal.until(lambda screen: "q quit" not in screen)


def test_tables_are_not_broken_in_words(daemon: Daemon, tmp_path: Path) -> None:
    with Terminal(tmp_path) as terminal:
        shown = {
            ("status",): ["TIER", "memory", "LIMIT", "misses", "datasets", "MOUNTPOINT"],
            ("mounts",): [DATASET, "/mnt/m", "alive"],
            ("dataset", "list"): [DATASET, "file://"],
            ("stats", "m", "--count", "2", "--interval", "0.2"): ["samples", "missed", "budget"],
            ("warmups",): ["DATASET", "STATE"],
            ("errors",): ["no errors"],
        }
        for number, (words, whole) in enumerate(shown.items()):
            terminal.run(f"clear; {command(daemon, *words)}; echo done {number}")
            screen = terminal.until_shows(f"\ndone {number}\n")
            assert all(text in screen for text in whole), screen


def test_status_is_watched_until_ctrl_c(daemon: Daemon, tmp_path: Path) -> None:
    with Terminal(tmp_path) as terminal:
        terminal.run(f"{command(daemon, 'status', '--watch', '0.3')}; echo status $?")
        terminal.until_shows("TIER", "clairvoyant")
        daemon.stop()
        terminal.until_shows("no daemon answers", "trying again")
        daemon.start()
        terminal.until_shows("TIER")
        terminal.press("C-c")
        terminal.until_shows("status 130")
    watched = subprocess.Popen(
        [CACHECTL, "status", "--watch", "0.2", "--json", "--socket", daemon.socket], stdout=subprocess.PIPE, text=True
    )
    with watched:
        assert watched.stdout is not None
        uptimes = [json.loads(watched.stdout.readline())["uptime"] for _ in range(3)]
        assert uptimes == sorted(uptimes)
        watched.send_signal(signal.SIGINT)
        assert watched.wait(60) == 130


@pytest.mark.own_daemon
def test_one_picture_as_text_and_as_a_document(daemon: Daemon) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [CACHECTL, "top", *words, "--interval", "0.2", "--socket", daemon.socket], capture_output=True, text=True,
            timeout=60, check=False, env={**os.environ, "COLUMNS": "80", "LINES": "24"}, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    text = run("--once")
    assert text.returncode == 0, text.stderr
    assert "train" in text.stdout
    assert "\x1b" not in text.stdout
    assert len(text.stdout.splitlines()) == 24
    document = json.loads(run("--json").stdout)
    assert document["status"]["version"]
    assert document["rates"].keys() == {"origin", "peers in", "peers out"}
    assert [job["job"] for job in document["jobs"]] == ["train"]
    assert [(one["name"], one["ssd"]) for one in document["datasets"]] == [(DATASET, 0)]
    assert document["datasets"][0]["memory"] > 0
    live = run()
    assert live.returncode == 1
    assert (
        live.stderr == "cachectl: top needs a terminal; `cachectl top --once` prints one picture, --json a document\n"
    )
    daemon.stop()
    assert run("--once").returncode == 3
