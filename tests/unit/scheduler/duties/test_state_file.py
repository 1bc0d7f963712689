import os
import time
from pathlib import Path

import pytest

from cachefs.errors import AlreadyExists, ConfigError
from cachefs.scheduling_messages import DatasetPolicy, PlacementRequest
from cachefs_scheduler.duties import state_file
from cachefs_scheduler.duties.job_table import AdmissionState, JobTable, KnownJob
from tests.unit.scheduler.duties.viewed import Duties


def known(job: str, state: AdmissionState = AdmissionState.WAITING, touched: float = 90.0) -> KnownJob:
    return KnownJob(PlacementRequest(job=job, dataset="set"), "s", 80.0, touched, state, ("n1",))


def test_jobs_come_back_with_their_age(tmp_path: Path) -> None:
    book = JobTable(10, 60.0)
    for job, state in (("a", AdmissionState.WAITING), ("b", AdmissionState.PLACED), ("c", AdmissionState.ASKED)):
        assert book.add_job(known(job, state))
    state_file.write_state(tmp_path, state_file.state_pieces(time.time(), book, [], Duties().advisor.reads, 100.0))
    saved = state_file.read_state(tmp_path)
    assert [one.ask.job for one in saved.jobs] == ["a", "b"]
    again = state_file.restored_job(saved.jobs[0], 5.0, 1000.0)
    assert (again.requested_at, again.mentioned_at, again.nodes, again.state) == (
        975.0,
        1000.0,
        ("n1",),
        AdmissionState.WAITING,
    )
    assert [path.name for path in tmp_path.iterdir()] == [state_file.FILE_NAME]


def test_what_is_written_in_pieces_is_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "_RECORDS", 3)
    book, policies = JobTable(100, 60.0), [DatasetPolicy(dataset="set", ttl=5.0)]
    reads = Duties().advisor.reads
    for number in range(10):
        assert book.add_job(known(f"job{number}"))
        reads.restore("n1" if number % 2 else "", f"s{number}", float(number))
    parts = list(state_file.state_pieces(1e9, book, policies, reads, 100.0))
    assert len(parts) == 3 + 4 + 4
    state_file.write_state(tmp_path, parts)
    saved = state_file.read_state(tmp_path)
    assert (saved.written, saved.policies, len(saved.jobs)) == (1e9, policies, 10)
    again = Duties().advisor.reads
    for one in saved.reads:
        again.restore(one.node, one.snapshot, 100.0 - one.seconds)
    assert set(again.all_records()) == {
        ("n1" if number % 2 else "", f"s{number}", float(number)) for number in range(10)
    }


@pytest.mark.parametrize("content", [b"", b"{", b'{"written": 1, "jobs": [{"ask": 3}]}', b"\xff\xfe"])
def test_a_damaged_file_is_set_aside(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / state_file.FILE_NAME
    path.write_bytes(content)
    assert state_file.read_state(tmp_path).jobs == []
    assert not path.exists()
    assert path.with_suffix(".bad").read_bytes() == content


def test_a_full_book_forgets_who_only_asked_and_takes_no_other() -> None:
    book = JobTable(2, 60.0)
    assert book.add_job(known("a", AdmissionState.ASKED))
    assert book.add_job(known("b"))
    assert book.add_job(known("c"))
    assert book.get("a") is None
    assert not book.add_job(known("d"))
    assert book.add_job(known("b", AdmissionState.PLACED))
    assert book.lapsed_jobs(100.0) == []
    assert [one.request.job for one in book.lapsed_jobs(151.0)] == ["c"]
    assert {one.request.job for one in book.lapsed_jobs(700.0)} == {"b", "c"}


def test_a_deep_file_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / state_file.FILE_NAME).write_bytes(b'{"more":' + b"[" * 100_000)
    assert state_file.read_state(tmp_path).jobs == []


def test_a_directory_is_of_one_service(tmp_path: Path) -> None:
    first = state_file.lock_directory(tmp_path)
    assert first is not None
    with pytest.raises(AlreadyExists, match="another cachefs-scheduler keeps its queue there"):
        state_file.lock_directory(tmp_path)
    os.close(first)
    second = state_file.lock_directory(tmp_path)
    assert second is not None
    os.close(second)
    assert state_file.lock_directory(tmp_path / "none") is None


def test_a_file_of_a_newer_service_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / state_file.FILE_NAME
    content = f'{{"format":{state_file.FORMAT + 1},"written":1.0,"jobs":"of another form"}}'
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"is of a newer cachefs-scheduler \(its format is 2, and this one knows 1\)"):
        state_file.read_state(tmp_path)
    assert path.read_text() == content


def test_a_file_of_before_has_no_format_and_is_read(tmp_path: Path) -> None:
    (tmp_path / state_file.FILE_NAME).write_text('{"written":1.0}')
    assert state_file.read_state(tmp_path).written == 1.0
