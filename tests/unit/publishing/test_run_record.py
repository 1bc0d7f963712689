"""What processes of a run leave for each other: what is read of it, and what is removed once nobody needs it."""

import json
import os
import socket
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from cachefs.publishing import exit_summary, run_record
from cachefs.publishing.run_record import LoaderRecord, ProcessRecord


def test_who_reads_the_records_waits_for_no_pipe_and_leaves_out_what_is_none(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text(json.dumps(asdict(ProcessRecord(1, loaders=[LoaderRecord("x")]))))
    os.mkfifo(tmp_path / "2.json")
    (tmp_path / "3.json").mkdir()
    (tmp_path / "4.json").symlink_to("/dev/zero")
    for number, text in enumerate(("{", "[]", '"x"', "{}", '{"pid": 1, "loaders": 5}'), 5):
        (tmp_path / f"{number}.json").write_text(text)
    assert [record.pid for record in run_record.read_records(str(tmp_path))] == [1]


def test_runs_that_are_over_are_removed_but_for_those_of_other_containers(tmp_path: Path) -> None:
    over = subprocess.Popen(["true"])
    over.wait()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    names = (f"run-{over.pid}-{namespace}-a", f"run-{os.getpid()}-{namespace}-a", f"run-{over.pid}-1-a")
    for name in names:
        (tmp_path / name).mkdir()
    run_record.remove_dead_runs(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_what_a_killed_helper_has_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, used = (tmp_path / "user" / job / "1-x" for job in ("left", "used"))
    for directory in (left, used):
        directory.mkdir(parents=True)
    with _listener(used):
        _listener(left).close()
        run_record.remove_dead_runs(tmp_path / "user")
        assert left.exists()  # it may be about to listen
        monkeypatch.setattr(run_record, "_NEW_SECONDS", -1.0)
        run_record.remove_dead_runs(tmp_path / "user")
        assert used.exists()
        assert not left.parent.exists()


def _listener(directory: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.bind(str(directory / "s"))
    made.listen(1)
    return made


def test_the_summary_does_not_wait_for_a_helper_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run_record.RUN_VARIABLE, str(tmp_path))
    waits: list[None] = []
    monkeypatch.setattr(exit_summary.select, "select", lambda *_: waits.append(None))
    with subprocess.Popen(["true"]) as process:
        pass
    namespace, _, own = run_record.process_identity().partition("-")
    for helper, has_waited in ((f"{namespace}-{process.pid}", False), (f"{namespace}-{own}", True), ("1-1", True)):
        run_record.write_record(ProcessRecord(pid=1, top="7", helper=helper))
        [found] = exit_summary._final_records(str(tmp_path), "7")
        assert bool(waits) is has_waited
        assert found.problem.startswith("no answer within" if has_waited else "its helper has ended")
        waits.clear()
    run_record.write_record(ProcessRecord(pid=1, top="7", helper=f"{namespace}-{own}", is_final=True))
    assert not exit_summary._final_records(str(tmp_path), "7")[0].problem
    assert not waits
