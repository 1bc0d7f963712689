"""Prolog and Epilog of a real Slurm mount what jobs name, as long as one of them runs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs_bench.lab.slurm import LabSlurm, run_slurm
from cachefs_scheduler.slurm.hint import PLUGIN_DIRECTORY
from tests.daemon import Daemon
from tests.waiting import until

BIN = Path(sys.executable).parent
WAIT = 60.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    work = tmp_path_factory.mktemp("d")
    (work / "tree").mkdir()
    (work / "tree" / "file").write_bytes(b"content")
    with Daemon(work / "node") as running:
        running.add_dataset("tree", f"file://{work}/tree")
        yield running


@pytest.fixture
def settings(daemon: Daemon, tmp_path: Path) -> dict[str, str]:
    return {
        "PATH": f"{BIN}:/usr/bin:/bin:/usr/sbin:/sbin",
        "CACHEFS_SOCKET": str(daemon.socket),
        "CACHEFS_MOUNTS": str(tmp_path / "mounts"),
        "CACHEFS_USERS": str(tmp_path / "users"),
    }


def script(name: str) -> Path:
    return Path(str(PLUGIN_DIRECTORY)) / f"cachefs-{name}.sh"


def wrapped(name: str, settings: dict[str, str], directory: Path) -> Path:
    """The script with these settings, as Slurm calls it."""
    path = directory / f"{name}.sh"
    lines = "".join(f"export {key}='{value}'\n" for key, value in settings.items())
    path.write_text(f"#!/bin/sh\n{lines}exec sh {script(name)}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def slurm(tmp_path: Path, settings: dict[str, str]) -> Iterator[LabSlurm]:
    (tmp_path / "slurm").mkdir()
    prolog, epilog = (wrapped(name, settings, tmp_path) for name in ("prolog", "epilog"))
    with run_slurm(tmp_path / "slurm", nodes=1, more=f"Prolog={prolog}\nEpilog={epilog}") as running:
        yield running


def test_jobs_read_what_they_name_and_the_last_one_unmounts(
    slurm: LabSlurm, daemon: Daemon, settings: dict[str, str], tmp_path: Path
) -> None:
    reads = f"#!/bin/sh\ncat {settings['CACHEFS_MOUNTS']}/tree/file > {tmp_path}/read.$SLURM_JOB_ID\nsleep 600\n"
    comment = "--comment=mine; cachefs:tree,policy=prefer"
    first, second = slurm.submit_job(comment, script=reads), slurm.submit_job(comment, script=reads)
    for job in (first, second):
        path = tmp_path / f"read.{job}"
        until(lambda path=path: path.exists() and path.read_bytes() == b"content", f"{path} is not read")
    (mount,) = daemon.status().mounts
    assert mount.mountpoint == f"{settings['CACHEFS_MOUNTS']}/tree"
    users = Path(settings["CACHEFS_USERS"]) / "tree"
    slurm.run_command("scancel", str(first))
    until(lambda: sorted(os.listdir(users)) == [str(second)], "the first job is still a user")
    assert [one.id for one in daemon.status().mounts] == [mount.id]
    slurm.run_command("scancel", str(second))
    until(lambda: not users.exists(), "the second job is still a user")
    # The daemon cannot tell: the lab's nodes have a process namespace and a mount namespace of their own.
    seen = tmp_path / "other"
    slurm.submit_job(
        script=f"#!/bin/sh\nfor i in $(seq 600); do mountpoint -q {mount.mountpoint} || break; sleep 0.1; done\n"
        f"cat {mount.mountpoint}/file > {seen}.new 2>&1; mv {seen}.new {seen}\n"
    )
    until(seen.exists, "a job that names nothing does not run")
    assert "No such file" in seen.read_text()
    # "-" behind the state: the node is planned for a job.
    state = slurm.run_command("sinfo", "--noheader", "--format=%T").removesuffix("-")
    assert state in ("idle", "mixed", "allocated", "completing")


def test_what_is_no_name_mounts_nothing_and_is_no_failure(settings: dict[str, str], tmp_path: Path) -> None:
    job = settings | {"SLURM_JOB_ID": "7"}
    for comment in (
        "",
        "cachefs:",
        "cachefs:../../etc",
        "cachefs:$(touch hacked)",
        "cachefs:`touch hacked`",
        "xcachefs:tree",
    ):
        own = job | {"SLURM_JOB_COMMENT": comment}
        subprocess.run(["sh", script("prolog")], env=own, cwd=tmp_path, check=True, timeout=WAIT)
        assert not (tmp_path / "hacked").exists(), comment
        assert not (tmp_path / "mounts").exists(), comment
    subprocess.run(["sh", script("epilog")], env=job, cwd=tmp_path, check=True, timeout=WAIT)


def test_without_a_daemon_or_dataset_jobs_start_all_the_same(settings: dict[str, str], tmp_path: Path) -> None:
    job = settings | {"SLURM_JOB_ID": "7", "SLURM_JOB_COMMENT": "cachefs:none", "CACHEFS_OPTIONS": "daemon_wait=0"}
    for own in (job, job | {"CACHEFS_SOCKET": str(tmp_path / "nobody")}):
        for name in ("prolog", "epilog"):
            subprocess.run(["sh", script(name)], env=own, check=True, timeout=WAIT)
    assert not list((tmp_path / "users").glob("*/*"))


def test_the_scripts_are_what_a_shell_understands() -> None:
    for name in ("prolog", "epilog"):
        subprocess.run([shutil.which("dash") or "sh", "-n", script(name)], check=True, timeout=WAIT)
