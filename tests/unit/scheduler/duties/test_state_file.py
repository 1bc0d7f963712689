import time
from pathlib import Path

import pytest
from cachefs_scheduler.duties import state_file
from cachefs_scheduler.duties.book import Book, JobState, KnownJob

from cachefs.scheduling_messages import Ask


def known(job: str, state: JobState = JobState.WAITING, touched: float = 90.0) -> KnownJob:
    return KnownJob(Ask(job=job, dataset="set"), "s", 80.0, touched, state, ("n1",))


def test_jobs_come_back_with_their_age(tmp_path: Path) -> None:
    book = Book(10, 60.0)
    for job, state in (("a", JobState.WAITING), ("b", JobState.PLACED), ("c", JobState.ASKED)):
        assert book.put(known(job, state))
    state_file.write(tmp_path, state_file.Saved(time.time(), state_file.saved_jobs(book, 100.0)))
    saved = state_file.read(tmp_path)
    assert [one.ask.job for one in saved.jobs] == ["a", "b"]
    again = state_file.restored_job(saved.jobs[0], 5.0, 1000.0)
    assert (again.since, again.touched, again.nodes, again.state) == (975.0, 1000.0, ("n1",), JobState.WAITING)
    assert [path.name for path in tmp_path.iterdir()] == [state_file.NAME]


@pytest.mark.parametrize("content", [b"", b"{", b'{"written": 1, "jobs": [{"ask": 3}]}', b"\xff\xfe"])
def test_a_damaged_file_is_set_aside(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / state_file.NAME
    path.write_bytes(content)
    assert state_file.read(tmp_path).jobs == []
    assert not path.exists()
    assert path.with_suffix(".bad").read_bytes() == content


def test_a_full_book_forgets_who_only_asked_and_takes_no_other() -> None:
    book = Book(2, 60.0)
    assert book.put(known("a", JobState.ASKED))
    assert book.put(known("b"))
    assert book.put(known("c"))
    assert book.get("a") is None
    assert not book.put(known("d"))
    assert book.put(known("b", JobState.PLACED))
    assert book.lapsed(100.0) == []
    assert book.lapsed(151.0) == ["c"]
    assert set(book.lapsed(700.0)) == {"b", "c"}
