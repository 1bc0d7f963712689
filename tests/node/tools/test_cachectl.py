"""cachectl with a real daemon and real mounts, which the tests of this file share."""

import contextlib
import fcntl
import json
import os
import pty
import random
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachefs.mount import kernel
from cachefs.mount_table import mount_points
from cachefs_tools.cachectl import main
from tests.cachectl import CACHECTL, cachectl, cachectl_process, run_here
from tests.daemon import Daemon, shared_daemon
from tests.mounting import frozen, mount_pid, mounted
from tests.waiting import until

ODD_NAME = b"odd \xff\n[bold]name"
SMALL = {"daemon": {"block_size": "1MiB"}, "memory": {"budget": "16MiB"}, "ssd": {"budget": "16MiB"}}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """20 images, a file of several blocks, an empty file, and a file whose name no terminal should be shown."""
    top = tmp_path / "tree"
    numbers = random.Random(7)
    for number in range(20):
        path = top / f"images/class{number % 4}/{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(numbers.randbytes(10_000 + number))
    (top / "big").write_bytes(numbers.randbytes(3_500_000))
    (top / "empty").touch()
    (top / os.fsdecode(ODD_NAME)).write_bytes(b"odd")
    return top


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("node"), SMALL) as running:
        yield running


@pytest.fixture
def daemon(request: pytest.FixtureRequest, running: Daemon, tmp_path: Path, tree: Path) -> Iterator[Daemon]:
    with shared_daemon(request, lambda: running, lambda: Daemon(tmp_path / "node", SMALL)) as daemon:
        daemon.add_dataset("tree", f"file://{tree}")
        yield daemon


def run(daemon: Daemon | Path, *arguments: str | bytes | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    """Run a command, in this process where it can be."""
    socket = daemon if isinstance(daemon, Path) else daemon.socket
    return (cachectl_process if arguments[0] == "mount" else cachectl)(socket, *arguments, stdin=stdin)


def answer(daemon: Daemon, *arguments: str | bytes | Path, stdin: bytes = b"") -> Any:
    done = run(daemon, *arguments, "--json", stdin=stdin)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def failure(daemon: Daemon | Path, *arguments: str | bytes | Path, status: int = 1) -> str:
    """Run a command that must fail. Returns the one line that it prints."""
    done = run(daemon, *arguments)
    assert done.returncode == status, done
    assert done.stdout == ""
    assert done.stderr.startswith("cachectl: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_statuses_and_output_of_a_process(daemon: Daemon) -> None:
    done = cachectl_process(daemon.socket, "dataset", "list", "--json")
    assert (done.returncode, [each["name"] for each in json.loads(done.stdout)["datasets"]]) == (0, ["tree"])
    done = cachectl_process(daemon.socket, "dataset", "show", "other")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)


def test_no_daemon_is_status_3_and_says_how_to_start_one(tmp_path: Path) -> None:
    assert "start it with `cachefsd`" in failure(tmp_path / "nothing", "status", status=3)
    done = run(tmp_path / "nothing", "status", "--json")
    assert json.loads(done.stdout)["error"] == "DaemonUnavailable"


@pytest.mark.parametrize(
    "arguments",
    [
        ["dataset", "show"],
        ["warmup", "tree", "--fraction", "1.5"],
        ["warmup", "tree", "--fraction", "x%"],
        ["job", "publish", "x", "tree", "--sampler", "sequential", "--seed", str(2**64)],
        ["job", "publish", "x", "tree", "--sampler", "sequential", "--epochs", str(2**64)],
    ],
)
def test_wrong_usage_is_status_2(tmp_path: Path, arguments: list[str]) -> None:
    assert run(tmp_path / "nothing", *arguments).returncode == 2


def test_no_directory_is_not_the_current_one(tmp_path: Path) -> None:
    assert "the directory is empty" in failure(tmp_path / "nothing", "umount", "")


def test_an_answer_that_cannot_be_written_is_told_in_a_line(daemon: Daemon) -> None:
    for option, redirected, status in (("", "/dev/full", 1), ("--json", "/dev/full", 1), ("", "&-", 0)):
        command = f'"$0" mounts {option} --socket "$1" >{redirected}'
        done = subprocess.run(
            ["bash", "-c", command, CACHECTL, daemon.socket], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == status, done.stderr
        assert done.stderr.count("\n") == status
        assert ("No space left" in done.stderr) == bool(status)


def test_json_of_a_mount_that_fails_says_why(tmp_path: Path) -> None:
    done = run(tmp_path / "nothing", "mount", "tree", tmp_path, "-o", "bogus", "--json")
    assert done.returncode == 1
    assert "'bogus' is not understood" in json.loads(done.stdout)["message"]
    assert done.stderr.startswith("cachectl: mount option 'bogus'")
    done = run(tmp_path / "nothing", "mount", "tree", tmp_path / "none", "--json")
    assert (done.returncode, "does not exist" in json.loads(done.stdout)["message"]) == (32, True)


def test_what_is_not_there_is_named(daemon: Daemon) -> None:
    for arguments in (
        ["dataset", "show", "other"], ["dataset", "rm", "other", "-y"], ["dataset", "refresh", "other"],
        ["warmup", "other"], ["evict", "other", "-y"], ["pin", "other"], ["ls", "other"], ["ls", "other", "--cached"],
    ):  # fmt: skip
        assert "other" in failure(daemon, *arguments), arguments
    for arguments in (["warmup", "tree", "images/none"], ["evict", "tree", "none"], ["ls", "tree", "images/none"]):
        assert "none" in failure(daemon, *arguments), arguments


def test_a_dataset_from_add_to_rm(daemon: Daemon, tree: Path) -> None:
    images = f"file://{tree}/images"
    added = answer(daemon, "dataset", "add", "images", images)["dataset"]
    assert (added["name"], added["files"], added["directories"]) == ("images", 20, 4)
    assert {each["name"] for each in answer(daemon, "dataset", "list")["datasets"]} == {"images", "tree"}
    assert "refresh" in failure(daemon, "dataset", "add", "images", images)

    (tree / "images/class0/000.jpg").write_bytes(b"changed")
    (tree / "images/class0/004.jpg").unlink()
    (tree / "images/new").write_bytes(b"new")
    diff = answer(daemon, "dataset", "refresh", "images")["diff"]
    assert diff == {"added": 1, "changed": 1, "removed": 1, "unchanged": 18}
    shown = answer(daemon, "dataset", "show", "images")
    assert shown["dataset"]["files"] == 20
    assert shown["snapshots"] == [shown["dataset"]["snapshot"], added["snapshot"]]

    assert "--yes" in failure(daemon, "dataset", "rm", "images")
    assert answer(daemon, "dataset", "rm", "images", "--yes") == {"blocks": 0, "bytes": 0}
    assert [each["name"] for each in answer(daemon, "dataset", "list")["datasets"]] == ["tree"]


def test_limits_of_a_dataset_are_set_and_shown(daemon: Daemon) -> None:
    assert run(daemon, "dataset", "limit", "tree", "--share", "40%", "--ttl", "7d").stdout.splitlines() == [
        "tree: at most 40.0 % of each tier, dropped when not read for 7 d 0 h"
    ]
    [shown] = answer(daemon, "dataset", "list")["datasets"]
    assert (shown["share"], shown["ttl"]) == (0.4, 7 * 86400)
    assert "limits     at most 40.0 % of each tier" in run(daemon, "dataset", "show", "tree").stdout
    changed = answer(daemon, "dataset", "limit", "tree", "--ttl", "none")
    assert (changed["share"], changed["ttl"]) == (0.4, 0)
    assert "no limits" in run(daemon, "dataset", "limit", "tree", "--share", "none").stdout
    assert "\nlimits" not in run(daemon, "dataset", "show", "tree").stdout
    for wrong in (["--ttl", "7 weeks"], ["--ttl", "0s"], ["--share", "140%"], []):
        assert run(daemon, "dataset", "limit", "tree", *wrong).returncode == 2


def test_an_origin_that_cannot_be_listed_is_named(daemon: Daemon, tmp_path: Path) -> None:
    assert "gone" in failure(daemon, "dataset", "add", "gone", f"file://{tmp_path}/gone")
    assert "ftp://host" in failure(daemon, "dataset", "add", "strange", "ftp://host/dir")


def test_warmup_shows_in_status_and_ls_and_is_undone_by_evict(daemon: Daemon) -> None:
    whole, hit_ratios = (
        answer(daemon, "dataset", "show", "tree")["dataset"]["bytes"],
        answer(daemon, "status")["hit_ratios"],
    )
    warmed = answer(daemon, "warmup", "tree")
    assert (warmed["state"], warmed["bytes"], warmed["bytes_total"]) == ("done", whole, whole)
    assert (warmed["blocks"], warmed["failed"], warmed["skipped"]) == (25, 0, 0)

    status = answer(daemon, "status")
    assert sum(tier["blocks"] for tier in status["tiers"]) == 25
    assert status["hit_ratios"] == hit_ratios, "a warmup is no hit"
    files = {file["path"]: file for file in answer(daemon, "ls", "tree", "--cached")["files"]}
    assert len(files) == 22
    assert sum(files[os.fsdecode(ODD_NAME)]["cached"]) == 3
    assert sum(answer(daemon, "dataset", "show", "tree")["cached"].values()) == whole

    assert answer(daemon, "evict", "tree", "images/class1", "/big") == {"blocks": 9, "bytes": 3_500_000 + 50_045}
    assert "--yes" in failure(daemon, "evict", "tree")
    assert "--yes" in failure(daemon, "evict", "tree", "/")
    assert answer(daemon, "evict", "tree", "--yes")["blocks"] == 16
    assert answer(daemon, "ls", "tree", "--cached") == {"files": []}


def test_a_dry_run_says_what_would_be_done_and_does_nothing(daemon: Daemon, tree: Path) -> None:
    assert answer(daemon, "warmup", "tree", "images/class1")["blocks"] == 5
    forecast = answer(daemon, "warmup", "tree", "--dry-run")
    assert (forecast["wanted"]["blocks"], forecast["here"]["files"], forecast["here"]["blocks"]) == (25, 5, 5)
    said = run(daemon, "warmup", "tree", "-n").stdout
    assert "tree: would fetch 20 blocks, " in said
    assert "; 5 whole files" in said
    answer(daemon, "pin", "tree", "images/class1/001.jpg")
    before = daemon.status()
    found = answer(daemon, "evict", "tree", "--dry-run")
    assert found["here"]["blocks"] == 5
    assert found["pinned"]["blocks"] == 1
    assert "would free 5 blocks" in run(daemon, "evict", "tree", "-n").stdout
    assert "this frees all of tree on this node: 5 blocks" in failure(daemon, "evict", "tree")
    assert answer(daemon, "evict", "tree", "images/class2", "-n")["here"]["blocks"] == 0
    assert "no 'none'" in failure(daemon, "evict", "tree", "none", "-n")
    assert "would forget tree" in run(daemon, "dataset", "rm", "tree", "-n").stdout
    answer(daemon, "unpin", "tree")
    found = answer(daemon, "dataset", "add", "trial", f"file://{tree}", "--dry-run")["dataset"]
    known = answer(daemon, "dataset", "show", "tree")["dataset"]
    assert [found[key] for key in ("files", "bytes", "snapshot")] == [
        known[key] for key in ("files", "bytes", "snapshot")
    ]
    assert "nothing was added" in run(daemon, "dataset", "add", "trial", f"file://{tree}", "-n").stdout
    assert "already" in failure(daemon, "dataset", "add", "tree", f"file://{tree}", "-n")
    assert "trial" not in run(daemon, "dataset", "list").stdout
    assert not list(daemon.home.glob("state/.trial-*"))
    now = daemon.status()
    assert (now.fetched_blocks, now.index_blocks, now.datasets) == (
        before.fetched_blocks, before.index_blocks, before.datasets,
    )  # fmt: skip


def test_warmup_takes_lists_and_fractions(daemon: Daemon) -> None:
    assert answer(daemon, "warmup", "tree", "images", "--fraction", "25%")["blocks"] == 5
    listed = answer(daemon, "warmup", "tree", "--list", "-", "-0", stdin=ODD_NAME + b"\0big\0")
    assert (listed["blocks"], listed["bytes"]) == (5, 3_500_003)
    assert run(daemon, "warmup", "tree", "--list", "-", stdin=b"\n").returncode == 2
    assert answer(daemon, "warmup", "tree", "--list", "-", stdin=b"./big\r\n/big\r\n")["missing"] == 0
    partly = run(daemon, "warmup", "tree", "--list", "-", "--json", stdin=b"gone/1\nbig\ngone/2\n")
    found = json.loads(partly.stdout)
    assert (partly.returncode, found["blocks"] > 0, found["missing"], found["first_missing"]) == (4, True, 2, "gone/1")
    nothing = run(daemon, "warmup", "tree", "--list", "-", stdin=b"gone/1\ngone/2\n")
    assert nothing.returncode == 1
    assert "paths are relative to the dataset" in nothing.stderr


def test_warmup_in_the_background_returns_at_once_and_is_done_soon(daemon: Daemon) -> None:
    assert answer(daemon, "warmup", "tree", "--no-wait")["blocks_total"] == 25
    until(lambda: daemon.status().index_blocks == 25, "the warmup ends")


def test_a_warmup_that_finds_no_room_is_status_4(daemon: Daemon, tree: Path) -> None:
    (tree / "huge").write_bytes(random.Random(1).randbytes(48 << 20))
    answer(daemon, "dataset", "refresh", "tree")
    done = run(daemon, "warmup", "tree")
    assert done.returncode == 4
    assert "found no room" in done.stdout


def test_pins_are_listed_and_taken_back(daemon: Daemon) -> None:
    assert answer(daemon, "pin", "tree", "images/class1/")["files"] == 5
    assert answer(daemon, "dataset", "show", "tree")["pinned"] == ["images/class1"]
    assert [file["pinned"] for file in answer(daemon, "ls", "tree", "images", "--cached")["files"]] == [True] * 5
    assert "images/class1" in failure(daemon, "unpin", "tree", "big")
    assert answer(daemon, "unpin", "tree")["files"] == 5
    assert answer(daemon, "dataset", "show", "tree")["pinned"] == []


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["dataset", "show", "t"], ["tree"]),
        (["dataset", "rm", "x"], []),
        (["mount", "tr"], ["tree"]),
        (["ls", "tree", "im"], ["images/"]),
        (["warmup", "tree", "images/cl"], ["images/class0/", "images/class1/"]),
        (["pin", "tree", "none/x"], []),
        (["ls", "none", ""], []),
    ],
)
def test_a_shell_completes_names_and_paths(daemon: Daemon, words: list[str], offered: list[str]) -> None:
    line = {"COMP_WORDS": " ".join(["cachectl", *words]), "COMP_CWORD": str(len(words))}
    environment = {**line, "_CACHECTL_COMPLETE": "bash_complete", "CACHEFS_SOCKET": str(daemon.socket)}
    done = run_here(main, "cachectl", [], environment=environment)
    assert done.stderr == ""
    assert [each.partition(",")[2] for each in done.stdout.split()][: len(offered) or None] == offered


def test_ls_lists_a_directory_of_the_snapshot(daemon: Daemon, tree: Path) -> None:
    (tree / "big").unlink()
    entries = answer(daemon, "ls", "tree")["entries"]
    assert [entry["name"] for entry in entries] == ["big", "empty", "images", os.fsdecode(ODD_NAME)]
    assert [entry["directory"] for entry in entries] == [False, False, True, False]
    assert answer(daemon, "ls", "tree", "big")["entries"] == [{"name": "big", "directory": False, "size": 3_500_000}]


def test_text_is_safe_and_whole_in_a_pipe_and_within_a_terminal(daemon: Daemon, tree: Path) -> None:
    deep = tree / "/".join(["d" * 60] * 5)
    deep.mkdir(parents=True)
    (deep / ("f" * 200)).write_bytes(b"deep")
    answer(daemon, "dataset", "add", "long", f"file://{deep}")
    answer(daemon, "dataset", "refresh", "tree")
    answer(daemon, "warmup", "tree")
    path = str((deep / ("f" * 200)).relative_to(tree))
    for arguments, whole in (
        (["status"], str(daemon.ssd)), (["ls", "tree", "--cached"], path), (["dataset", "list"], f"file://{deep}"),
        (["dataset", "show", "long"], f"url        file://{deep}\n"),
    ):  # fmt: skip
        text = run(daemon, *arguments).stdout
        assert whole in text
        assert all(line == line.rstrip() for line in text.splitlines())
    assert r"odd \xff\n[bold]name" in run(daemon, "ls", "tree").stdout
    narrow = on_terminal(daemon, "status")
    assert "clairvoyant" in narrow
    assert max(map(len, narrow.splitlines())) <= 80


def on_terminal(daemon: Daemon, *arguments: str) -> str:
    """What a command writes to a terminal of 80 columns."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    with open(controller, encoding="utf-8") as screen:
        environment = {**os.environ, "TERM": "dumb"}
        command = [CACHECTL, *arguments, "--socket", daemon.socket]
        child = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=subprocess.DEVNULL, env=environment)
        os.close(terminal)
        lines = []
        with contextlib.suppress(OSError):  # the end of a terminal is an error
            lines.extend(screen)
        assert child.wait(30) == 0
        return "".join(lines)


def test_verify_drops_what_is_damaged_and_is_status_4(daemon: Daemon) -> None:
    answer(daemon, "warmup", "tree")
    before = answer(daemon, "status")["repairs"]
    whole = run(daemon, "verify")
    assert (whole.returncode, whole.stdout[:18]) == (0, "verified 25 blocks")
    flip_bytes(max(daemon.memory.glob("*.seg"), key=lambda path: path.stat().st_blocks))
    damaged = run(daemon, "verify", "--json")
    assert damaged.returncode == 4
    repaired = json.loads(damaged.stdout)["repaired"]
    assert repaired >= 1
    assert answer(daemon, "status")["repairs"] == before + repaired
    assert run(daemon, "verify").returncode == 0


def flip_bytes(path: Path) -> None:
    """Change one byte in every 64 KiB, so the data of at least one block is damaged."""
    data = path.read_bytes()
    with path.open("r+b") as file:
        for offset in range(5000, len(data), 65536):
            file.seek(offset)
            file.write(bytes([data[offset] ^ 0xFF]))


def test_a_mount_from_mount_to_umount(daemon: Daemon, tree: Path, tmp_path: Path) -> None:
    directory = tmp_path / "mnt"
    assert "does not exist" in run(daemon, "mount", "tree", directory).stderr
    directory.mkdir()
    assert answer(daemon, "mount", "tree", directory) == {"spec": "tree", "mountpoint": str(directory)}
    with detached_at_last(directory):
        assert (directory / "big").read_bytes() == (tree / "big").read_bytes()
        (mount,) = answer(daemon, "mounts")["mounts"]
        assert (mount["mountpoint"], mount["spec"], mount["alive"]) == (str(directory), "tree", True)
        assert not mount["detached"]
        assert "is mounted at" in failure(daemon, "dataset", "rm", "tree", "-y")
        with (directory / "big").open("rb"):
            # In a process of its own, since a program does not name itself.
            refused = cachectl_process(daemon.socket, "umount", directory)
            assert refused.returncode == 1
            busy = refused.stderr
            assert f"(process {os.getpid()}: has {directory}/big open)" in busy
            assert "--lazy" in busy
            assert busy.count("(process ") == 1  # the mount's own processes do not keep it busy
            said = cachectl_process(daemon.socket, "umount", directory, "--lazy").stdout
            assert "its process continues until all its files are closed" in said
            assert f"(process {os.getpid()}: has {directory}/big open)" in said
            (mount,) = answer(daemon, "mounts")["mounts"]
            assert (mount["alive"], mount["detached"]) == (True, True)  # it serves who has the file open
            assert " detached " in run(daemon, "mounts").stdout
    assert "no cachefs is mounted" in failure(daemon, "umount", directory)


def test_info_tells_of_a_file_what_the_daemon_knows(daemon: Daemon, tree: Path, tmp_path: Path) -> None:
    with (
        mounted(daemon.socket, "tree", tmp_path / "one") as one,
        mounted(daemon.socket, "all", tmp_path / "every") as every,
        mounted(daemon.socket, f"file://{tree}", tmp_path / "url") as url,
    ):
        (one / "big").read_bytes()
        (shown,) = (view for view in answer(daemon, "dataset", "list")["datasets"] if view["name"] == "tree")
        status = (tree / "big").stat()
        for path in (one / "big", every / "tree" / "big", url / "big"):
            found = answer(daemon, "info", path)
            assert (found["dataset"], found["snapshot"], found["path"]) == ("tree", shown["snapshot"], "big")
            assert (found["size"], found["mtime_ns"]) == (status.st_size, status.st_mtime_ns)
            assert found["etag"].startswith(f"{status.st_size}-{status.st_mtime_ns}-")
            assert "origin" not in found["tiers"]
        assert "tiers      memory" in run(daemon, "info", one / "big").stdout
        assert answer(daemon, "info", one)["directory"]
        bound = tmp_path / "bound"
        bound.mkdir()
        subprocess.run(["mount", "--bind", next(path for path in one.iterdir() if path.is_dir()), bound], check=True)
        try:
            assert answer(daemon, "info", bound)["path"]
        finally:
            subprocess.run(["umount", bound], check=True)
        assert "has no 'nothing'" in failure(daemon, "info", one / "nothing")
        assert "a mount of several datasets" in failure(daemon, "info", every)
        assert "in no mount of cachefs" in failure(daemon, "info", tmp_path)


def test_what_was_unmounted_can_be_removed(daemon: Daemon, tmp_path: Path, tree: Path) -> None:
    directory = tmp_path / "mnt"
    directory.mkdir()
    for unmount in (
        lambda: run(daemon, "umount", directory),
        lambda: run(daemon, "umount", directory, "--lazy"),
        lambda: subprocess.run(["umount", directory], check=True),
    ):
        daemon.add_dataset("gone", f"file://{tree}")
        assert run(daemon, "mount", "gone", directory).returncode == 0
        with detached_at_last(directory):
            assert (directory / "big").read_bytes()
            unmount()
            done = run(daemon, "dataset", "rm", "gone", "-y")
            assert (done.returncode, done.stderr) == (0, "")


def test_umount_recovers_the_mount_point_of_a_killed_mount(daemon: Daemon, tmp_path: Path) -> None:
    directory = tmp_path / "mnt"
    with mounted(daemon.socket, "tree", directory):
        os.listdir(directory)
        os.kill(mount_pid(daemon.client, directory), signal.SIGKILL)
        until(lambda: is_dead(directory))
        assert [mount["alive"] for mount in answer(daemon, "mounts")["mounts"]] == [False]
        assert answer(daemon, "umount", directory)["recovered"] is True
        assert os.listdir(directory) == []


def test_a_mount_on_a_dead_mount_takes_its_place(daemon: Daemon, tree: Path, tmp_path: Path) -> None:
    directory = tmp_path / "mnt"
    with mounted(daemon.socket, "tree", directory):
        os.kill(mount_pid(daemon.client, directory), signal.SIGKILL)
        until(lambda: is_dead(directory))
        assert answer(daemon, "mount", "tree", directory)["mountpoint"] == str(directory)
        assert (directory / "big").read_bytes() == (tree / "big").read_bytes()


def test_a_hanging_mount_keeps_nobody_from_answering(daemon: Daemon, tmp_path: Path) -> None:
    directory = tmp_path / "mnt"
    with mounted(daemon.socket, "tree", directory), frozen(daemon.client, directory):
        for arguments in (["status"], ["mounts"], ["ls", "tree"], ["dataset", "list"], ["errors"]):
            assert run(daemon, *arguments).returncode == 0
        assert answer(daemon, "umount", directory, "--lazy")["recovered"] is False


def test_errors_name_the_object_that_could_not_be_read(daemon: Daemon, tree: Path) -> None:
    subject = str(tree / "big")
    assert subject not in run(daemon, "errors").stdout
    (tree / "big").unlink()
    assert run(daemon, "warmup", "tree", "big").returncode == 4
    assert [one for one in answer(daemon, "errors")["errors"] if one["subject"].endswith(subject)]
    assert subject in run(daemon, "errors").stdout


def test_a_terminal_is_asked_before_everything_goes(daemon: Daemon) -> None:
    answer(daemon, "warmup", "tree")
    assert evict_on_terminal(daemon, b"n\n") == 1
    assert answer(daemon, "status")["index_blocks"] == 25
    assert evict_on_terminal(daemon, b"y\n") == 0
    assert answer(daemon, "status")["index_blocks"] == 0


def evict_on_terminal(daemon: Daemon, typed: bytes) -> int:
    controller, terminal = pty.openpty()
    try:
        command = [CACHECTL, "evict", "tree", "--socket", daemon.socket]
        child = subprocess.Popen(command, stdin=terminal, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.write(controller, typed)
        return child.wait(60)
    finally:
        os.close(controller)
        os.close(terminal)


def is_dead(directory: Path) -> bool:
    try:
        os.statvfs(directory)
    except OSError:
        return True
    return False


@contextlib.contextmanager
def detached_at_last(directory: Path) -> Iterator[None]:
    try:
        yield
    finally:
        if any(point.path == directory for point in mount_points()):
            kernel.unmount(directory, lazy=True)
