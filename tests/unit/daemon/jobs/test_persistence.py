"""Jobs on disk follow those in memory, whatever happens while one is being written."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cachefs.errors import CachefsError
from cachefs_daemon.jobs.consumer import Consumer
from cachefs_daemon.jobs.job_files import POSITIONS_SUFFIX, PUBLICATION_SUFFIX, JobFiles, JobRecord
from cachefs_daemon.jobs.persistence import JobPersistence
from cachefs_daemon.jobs.registry import Job, JobRegistry
from cachefs_daemon.jobs.states import JobState
from cachefs_daemon.runtime.threads import Threads
from tests import virtual_time


class Running(JobRegistry):
    """Only what their persistence sees of them."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self.unsaved_jobs: set[str] = set()

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def set(self, name: str, source: str, state: JobState = JobState.RUNNING) -> None:
        self._jobs[name] = Job(name, source, state=state)
        self.unsaved_jobs.add(name)


class Interrupted(Threads):
    """Before the first job is written, something else happens."""

    def __init__(self, event: Callable[[str], None]) -> None:
        super().__init__()
        self._event: Callable[[str], None] | None = event

    async def background(self, work: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._event is not None:
            event, self._event = self._event, None
            event(args[0].job)
        return await super().background(work, *args, **kwargs)


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.ENDED])
def test_a_job_that_changes_while_another_is_written_is_kept_as_it_is_then(tmp_path: Path, state: JobState) -> None:
    jobs = Running()
    jobs.set("one", "before")
    jobs.set("two", "before")
    changed = ""

    def change_the_other(written: str) -> None:
        nonlocal changed
        changed = "two" if written == "one" else "one"
        jobs.set(changed, "after", state)

    async def save() -> None:
        threads = Interrupted(change_the_other)
        try:
            persistence = JobPersistence(jobs, tmp_path, threads)
            await persistence.save()
            await persistence.save()
        finally:
            threads.close()

    virtual_time.run(save())
    kept = {record.job: record.source for record, _ in JobFiles(tmp_path).load()}
    assert kept.pop(changed, None) == ("after" if state == JobState.RUNNING else None)
    assert list(kept.values()) == ["before"]


def test_one_that_cannot_be_written_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    jobs = Running()
    names = {"one", "two", "three"}
    for name in names:
        jobs.set(name, "")
    first = next(iter(jobs.unsaved_jobs))
    with closing(Threads()) as threads:
        persistence = JobPersistence(jobs, tmp_path, threads)
        virtual_time.run(persistence.save())
        (tmp_path / "jobs" / f"{first}{PUBLICATION_SUFFIX}").unlink()
        (tmp_path / "jobs" / f"{first}{PUBLICATION_SUFFIX}").mkdir()
        for name in names:
            jobs.set(name, "again")
        with pytest.raises(CachefsError):
            virtual_time.run(persistence.save())
        assert jobs.unsaved_jobs == {first}
    assert {record.job for record, _ in JobFiles(tmp_path).load() if record.source == "again"} == names - {first}


def test_a_record_that_makes_no_sense_is_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    jobs = Running()
    JobFiles(tmp_path).save(JobRecord("odd", "", 0.0, [], [], {"a snapshot": 3}))
    with closing(Threads()) as threads:
        persistence = JobPersistence(jobs, tmp_path, threads)
        virtual_time.run(persistence.restore())
        virtual_time.run(persistence.save())
    assert "the saved state of job odd is invalid" in caplog.text
    assert JobFiles(tmp_path).load() == []


def test_places_are_saved_though_a_job_cannot_be(tmp_path: Path) -> None:
    jobs = Running()
    for name in ("one", "two"):
        jobs.set(name, "")
    with closing(Threads()) as threads:
        persistence = JobPersistence(jobs, tmp_path, threads)
        virtual_time.run(persistence.save())
        for suffix in (PUBLICATION_SUFFIX, POSITIONS_SUFFIX):
            (tmp_path / "jobs" / f"one{suffix}").unlink(missing_ok=True)
            (tmp_path / "jobs" / f"one{suffix}").mkdir()
        jobs.set("one", "again")
        [job] = [job for job in jobs if job.name == "two"]
        job.consumers["0"] = cast(Consumer, SimpleNamespace(name="0", epoch_position=(1, 7)))
        with pytest.raises(CachefsError):
            virtual_time.run(persistence.save())
    assert {record.job: places for record, places in JobFiles(tmp_path).load()} == {"two": {"0": (1, 7)}}
