"""What `cachefs run` changes in the environment of a command."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cachefs import mount_table
from cachefs.mount_table import MountPoint
from cachefs.run import (
    STARTUP_DIRECTORY,
    command_environment,
    find_python_path_override,
    mounts_of_daemon,
    run_command,
    summary_variables,
)

OTHER = "/opt/other/lib/python3.12/site-packages/cachefs/hooks/startup"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, STARTUP_DIRECTORY),
        ({"PYTHONPATH": ""}, STARTUP_DIRECTORY),
        ({"PYTHONPATH": ":"}, f"{STARTUP_DIRECTORY}::"),
        ({"PYTHONPATH": ":/lib"}, f"{STARTUP_DIRECTORY}::/lib"),
        ({"PYTHONPATH": "/lib::/lib:rel/"}, f"{STARTUP_DIRECTORY}:/lib::/lib:rel/"),
        # One command inside another, of the same installation or of two.
        ({"PYTHONPATH": str(STARTUP_DIRECTORY)}, STARTUP_DIRECTORY),
        ({"PYTHONPATH": f"{STARTUP_DIRECTORY}::/lib"}, f"{STARTUP_DIRECTORY}::/lib"),
        ({"PYTHONPATH": f"/lib:{OTHER}/:{STARTUP_DIRECTORY}"}, f"{STARTUP_DIRECTORY}:/lib"),
    ],
)
def test_a_directory_is_put_in_front_of_pythonpath(given: dict[str, str], expected: object) -> None:
    assert command_environment(given, ["python"], "job", None)["PYTHONPATH"] == str(expected)


@pytest.mark.parametrize(
    ("variables", "job", "expected"),
    [
        ({"SLURM_JOB_ID": "77"}, None, None),
        ({"SLURM_JOB_ID": "77"}, "mine", "mine"),
        ({"SLURM_JOB_ID": "77", "CACHEFS_JOB": "mine"}, None, "mine"),
        ({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "4294967291"}, None, None),  # the batch script
        ({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3"}, None, "slurm-77.3"),
        ({"PBS_JOBID": "5.server"}, None, "pbs-5.server"),
    ],
)
def test_a_job_of_slurm_is_named_where_its_step_is_known(
    variables: dict[str, str], job: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBID", "CACHEFS_JOB"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert command_environment(os.environ, ["srun", "python", "train.py"], job, None).get("CACHEFS_JOB") == expected


def test_nothing_else_of_the_environment_changes() -> None:
    given = {"PATH": "/bin", "OMP_NUM_THREADS": "3", "PYTHONHOME": "/h"}
    once = command_environment(given, ["python", "train.py"], None, "/s")
    added = {"PYTHONPATH": str(STARTUP_DIRECTORY), "CACHEFS_PYTHON": sys.executable, "CACHEFS_SOCKET": "/s"}
    name = once.pop("CACHEFS_JOB")
    assert name.startswith("train-")
    assert once == given | added


def test_a_socket_is_absolute_but_where_the_current_directory_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    assert command_environment({}, ["python"], "job", "rel.sock")["CACHEFS_SOCKET"] == f"{tmp_path}/gone/rel.sock"
    (tmp_path / "gone").rmdir()
    assert command_environment({}, ["python"], "job", "rel.sock")["CACHEFS_SOCKET"] == "rel.sock"
    assert run_command([""], "job", None) == 127
    assert capfd.readouterr().err == "cachefs: an empty name: no such command\n"


def test_what_is_said_of_a_command_is_one_line_without_control_characters(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["no\x1b[31m\nne"], "job", None) == 127
    assert run_command(["-\x1b[31m"], "job", None) == 2
    assert run_command(["true"], "job", "/no\nwhere") == 2
    assert capfd.readouterr().err.splitlines() == [
        "cachefs: no?[31m?ne: no such command",
        "cachefs: no such option: -?[31m; see `cachefs run --help`",
        "cachefs: there is no socket /no?where; give --socket the socket of a running cachefsd",
    ]


def test_the_option_and_the_variable_keep_a_run_quiet() -> None:
    assert summary_variables({}, quiet=True) == {"CACHEFS_QUIET": "1"}
    assert summary_variables({"CACHEFS_QUIET": "1"}, quiet=False) == {"CACHEFS_QUIET": "1"}


def test_a_command_inside_another_belongs_to_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    once = command_environment({}, ["python", "train.py"], "outer", "/s")
    for variable, value in once.items():
        monkeypatch.setenv(variable, value)
    assert command_environment(once, ["python", "inner.py"], None, None) == once
    assert command_environment(once, ["python", "inner.py"], "inner", None)["CACHEFS_JOB"] == "inner"


def test_a_socket_that_is_not_there_is_named_and_nothing_is_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else the job would publish through the mount, to another daemon perhaps than the one that was meant."""
    (tmp_path / "file").touch()
    for socket in (tmp_path / "cachefsd.sokc", tmp_path / "file" / "s"):
        assert run_command(["true"], "job", str(socket)) == 2
        assert f"there is no socket {socket}; give --socket the socket of" in capfd.readouterr().err


@pytest.mark.parametrize("parent", ["", "trap '' PIPE; "])
def test_a_command_ignores_the_signals_that_it_would_ignore_without(parent: str) -> None:
    """Python ignores SIGPIPE and SIGXFSZ, and what it becomes would."""
    ignored = f"{parent}{{}} grep SigIgn /proc/self/status; true"
    cachefs = f"{Path(sys.executable).with_name('cachefs')} run --quiet --"
    said = [
        subprocess.run(["sh", "-c", ignored.format(run)], stdout=subprocess.PIPE, check=True).stdout
        for run in ("", cachefs)
    ]
    assert said[0] == said[1]


def test_a_process_whose_command_cannot_be_run_ignores_them_still(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else it ends without a word where its standard error is a pipe without a reader, and so does a test runner."""
    numbers = (signal.SIGPIPE, signal.SIGXFSZ)
    before = [signal.getsignal(number) for number in numbers]
    assert before == [signal.SIG_IGN, signal.SIG_IGN]
    (tmp_path / "no-program").touch()
    for command, status in (("/no/such", 127), ("", 127), (str(tmp_path / "no-program"), 126)):
        assert run_command([command], "job", None) == status
        assert [signal.getsignal(number) for number in numbers] == before
    assert len(capfd.readouterr().err.splitlines()) == 3


@pytest.mark.parametrize(
    ("line", "is_anew"),
    [
        ("PYTHONPATH=. python train.py", True),
        ("export PYTHONPATH=/a:/b", True),
        ("cd x; PYTHONPATH=lib exec python train.py", True),
        ("env PYTHONPATH= python train.py", True),
        ("PYTHONPATH=.:$PYTHONPATH python train.py", False),
        ('export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}/a"', False),
        ("# PYTHONPATH=. python train.py", False),
        ("MY_PYTHONPATH=. python train.py", False),
        ("echo $PYTHONPATH", False),
    ],
)
def test_a_script_that_sets_pythonpath_anew_is_told(tmp_path: Path, line: str, is_anew: bool) -> None:
    """Its Pythons would not be watched, and nothing else would say so."""
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n{line}\n")
    assert find_python_path_override(["sh", str(script)]) == (str(script) if is_anew else "")


def test_a_command_that_sets_pythonpath_anew_is_told(tmp_path: Path) -> None:
    assert find_python_path_override(["env", "PYTHONPATH=.", "python"]) == "PYTHONPATH=."
    assert find_python_path_override(["env", f"PYTHONPATH={STARTUP_DIRECTORY}:.", "python"]) == ""
    (tmp_path / "program").write_bytes(b"\x7fELF\0\nPYTHONPATH=.\n")
    os.mkfifo(tmp_path / "pipe")
    command = ["python", "PYTHONPATH", str(tmp_path / "program"), str(tmp_path / "pipe"), str(tmp_path), "\0"]
    assert find_python_path_override(command) == ""


def test_of_a_command_only_its_script_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FIFO that is opened and closed kills its writer, and a file of a mount may hang."""
    names = ["program", "pipe", "script", "argument"]
    program, pipe, script, argument = (str(tmp_path / name) for name in names)
    os.mkfifo(pipe)
    Path(program).write_bytes(b"\x7fELF\0")
    Path(program).chmod(0o700)
    for text in (script, argument):
        Path(text).write_text("PYTHONPATH=. python\n")
    opened: list[str] = []
    real = os.open

    def note(path: str, flags: int, *others: int) -> int:
        opened.append(path)
        return real(path, flags, *others)

    monkeypatch.setattr(os, "open", note)
    assert find_python_path_override([program, pipe, script, argument]) == script
    assert set(opened) == {program, script}
    opened.clear()
    table = tmp_path / "mountinfo"
    table.write_text(f"22 1 254:0 / / rw - ext4 /dev/root rw\n31 22 0:57 / {tmp_path} ro - nfs4 server:/data ro\n")
    monkeypatch.setattr(mount_table, "_TABLE", table)
    assert find_python_path_override(["sh", script]) == ""
    assert opened == []


def test_only_the_living_mounts_of_the_daemon_are_named() -> None:
    mine, dead, others, unknown = (MountPoint(Path(f"/m/{name}"), "0:1", "cachefs:d") for name in "abcd")
    sockets = {mine.path: "/run/a", others.path: "/run/b", unknown.path: ""}
    assert mounts_of_daemon([dead, mine, others, unknown], sockets, Path("/run/a")) == [mine, unknown]
    assert mounts_of_daemon([dead, others], sockets, Path("/run/a")) == []
    assert mounts_of_daemon([dead, mine], {}, Path("/run/a")) == [dead, mine]  # their processes cannot be seen
