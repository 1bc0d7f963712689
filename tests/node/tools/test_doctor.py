"""`cachectl doctor` as a user runs it: with a real daemon, without one, and on machines with something wrong."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachefs.messages import OriginOptions
from cachefs.mount import kernel
from cachefs_tools.doctor import examination
from tests.cachectl import CACHECTL, cachectl, cachectl_process
from tests.daemon import Daemon, shared_daemon
from tests.mounting import frozen, mount_pid, mounted
from tests.servers.s3 import S3Server

Findings = dict[str, dict[str, Any]]


@pytest.fixture
def daemon(request: pytest.FixtureRequest, running: Daemon, tmp_path: Path) -> Iterator[Daemon]:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(20):
        (source / f"{number}.bin").write_bytes(os.urandom(20_000))
    with shared_daemon(request, lambda: running, lambda: Daemon(tmp_path / "node")) as daemon:
        daemon.add_dataset("tree", f"file://{source}")
        yield daemon


def doctor(socket: Path, *arguments: str | Path, before: tuple[str, ...] = (), status: int | None = None) -> Findings:
    """The findings by id; those of other tests' mounts are left out where one of this test has the same id. before: a
    command that runs cachectl. status: with which it must end."""
    words = ["doctor", *arguments, "--json"]
    if before:
        done = subprocess.run(
            [*before, CACHECTL, *words, "--socket", socket], capture_output=True, text=True, timeout=120, check=False
        )
    else:
        done = cachectl(socket, *words)
    assert "Traceback" not in done.stderr, done.stderr
    answer = json.loads(done.stdout)
    ours = sorted(answer["findings"], key=lambda each: str(socket.parent.parent) in each["way_out"])
    found = {each["id"]: each for each in ours}
    assert done.returncode == (4 if answer["counts"]["problem"] else 0), found
    assert status in (None, done.returncode), found
    return found


def in_namespace(script: str) -> tuple[str, ...]:
    """A command that runs another one in a mount namespace of its own, after a shell script."""
    return ("unshare", "--mount", "sh", "-euc", f'{script}\nexec "$@"', "sh")


@pytest.mark.own_daemon
def test_a_good_node(daemon: Daemon) -> None:
    config = daemon.home / "cachefsd.toml"
    found = doctor(daemon.socket, "tree", "--config", config)
    for name in ("config.file", "daemon.answers", "fuse.device", "disks.state", "speed.memory", "speed.ssd",
                 "origin.speed"):  # fmt: skip
        assert found[name]["level"] == "ok", found[name]
    assert "tree" in found["origin.speed"]["found"]
    assert "with the daemon's environment" in found["origin.speed"]["found"]
    text = cachectl_process(daemon.socket, "doctor")
    assert "In order" in text.stdout
    # The file that the daemon was started with is checked where none is named.
    assert "cachefsd.toml is valid" in " ".join(text.stdout.split())
    assert "defaults hold" not in text.stdout
    assert list(daemon.ssd.glob("**/*tmp*")) == []


def test_without_a_daemon_and_with_a_wrong_configuration(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'[memory]\nbudgt = 5\n[ssd]\ndir = "{tmp_path}/ssd"\nsegment_size = "1x"\n')
    found = doctor(tmp_path / "s", "nothing", "--config", config, status=4)
    assert found["daemon.answers"]["level"] == "problem"
    assert "budget" in found["config.file"]["found"] or "segment_size" in found["config.file"]["found"]
    assert found["origin.skipped"]["level"] == "note"


def test_a_daemon_that_is_stopped(daemon: Daemon) -> None:
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        found = doctor(daemon.socket, status=4)
        said = cachectl(daemon.socket, "status")
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert found["daemon.stopped"]["way_out"] == f"kill -CONT {daemon.process.pid}"
    assert said.returncode == 3
    assert f"kill -CONT {daemon.process.pid}" in said.stderr


def test_mounts_that_are_dead_or_hang(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "dead"), mounted(daemon.socket, "tree", tmp_path / "hangs"):
        good = doctor(daemon.socket)
        assert good["mounts.alive"]["level"] == "ok"
        assert "mounts.version" not in good
        assert {each.version for each in daemon.status().mounts} == {daemon.status().version}
        pid = mount_pid(daemon.client, tmp_path / "dead")
        for process in (pid, *children(pid)):
            os.kill(process, signal.SIGKILL)
        # A configuration that names a directory on a disk that hangs.
        config = tmp_path / "hanging.toml"
        config.write_text(f'[memory]\ndir = "{tmp_path}/hangs/never asked for"\n')
        monkeypatch.setattr(examination, "CHECK_SECONDS", 4.0)  # for the configuration, which never answers
        with frozen(daemon.client, tmp_path / "hangs"):
            found = doctor(daemon.socket, "--config", config, status=4)
        assert found["config.file"]["level"] == "problem"
        assert "no answer within" in found["config.file"]["found"]
        assert str(tmp_path / "dead") in found["mounts.dead"]["way_out"]
        assert str(tmp_path / "hangs") in found["mounts.hangs"]["way_out"]
        kernel.unmount(tmp_path / "dead", lazy=True)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_machine_without_fuse_with_a_full_tmpfs_and_a_wrong_fstab(tmp_path: Path) -> None:
    small, table = tmp_path / "small", tmp_path / "fstab"
    small.mkdir()
    table.write_text(
        f"nope {tmp_path}/absent cachefs defaults,bogus 0 0\n/dev/nvme0n1 {tmp_path}/disk xfs defaults 0 2\n"
    )
    config = tmp_path / "c.toml"
    config.write_text(
        f'[daemon]\nstate_dir = "{tmp_path}/state"\n[memory]\ndir = "{small}"\nbudget = "64MiB"\n'
        f'[ssd]\ndir = "{tmp_path}/disk/ssd"\nbudget = "64MiB"\n'
    )
    script = f"mount -t tmpfs -o size=8m tmpfs {small}\nmount --bind {table} /etc/fstab\nmount -t tmpfs tmpfs /dev\n"
    found = doctor(tmp_path / "s", "--config", config, before=in_namespace(script), status=4)
    assert "does not exist" in found["fuse.device"]["found"]
    assert "8 MiB" in found["disks.memory"]["found"]
    assert found["disks.ssd"]["way_out"] == f"mount {tmp_path}/disk"
    assert "bogus" in found["fstab.options"]["found"]
    assert found["fstab.source"]["level"] == "warning"
    assert found["fstab.directory"]["level"] == "problem"


def test_an_s3_origin_is_asked_with_the_daemons_credentials_which_are_never_shown(
    radosgw: S3Server, tmp_path: Path
) -> None:
    radosgw.create_bucket("doctor")
    radosgw.put("doctor", {f"{number}.bin": bytes(30_000) for number in range(8)})
    with Daemon(tmp_path / "node", environment=radosgw.environment) as daemon:
        daemon.add_dataset("shop", "s3://doctor", OriginOptions(endpoint_url=radosgw.endpoint))
        done = cachectl(daemon.socket, "doctor", "shop", "--json")
    found = {each["id"]: each for each in json.loads(done.stdout)["findings"]}
    assert found["credentials.s3"]["level"] == "ok", found["credentials.s3"]
    assert found["origin.speed"]["level"] == "ok", found
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert radosgw.environment[name] not in done.stdout + done.stderr
