"""When jobs that are held are let go though nobody gives slots, as the hint file tells."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from cachefs.errors import CachefsError
from cachefs_scheduler.slurm import hint
from cachefs_scheduler.slurm.hint_file import HintHeading, HintStamp, age_and_lifetime, hints_text, write_hints
from cachefs_scheduler.slurm.job_records import JobTag, SlurmJob
from tests import virtual_time


def hints(path: Path, age: float = 0.0, *, boot: bool = True) -> None:
    now = HintStamp.current()
    stamp = HintStamp(now.seconds - round(age), now.uptime - age if boot else 5.0, now.boot if boot else "other")
    write_hints(path, hints_text(HintHeading(stamp, 5, steer=True, wait="hold", wait_for=120, cpus=4), {}, {}))


@pytest.mark.parametrize("boot", [True, False])
def test_the_age_of_the_file_is_what_lua_takes_it_for(tmp_path: Path, boot: bool) -> None:
    hints(tmp_path / "hints", 10.0, boot=boot)
    found = age_and_lifetime(tmp_path / "hints")
    assert found is not None
    assert 9 <= found[0] < 70
    assert found[1] == 5


@pytest.mark.parametrize("text", ["", "cachefs-hints 2\n", "cachefs-hints 1\nwritten x 1.0 b\nlasts 60\n"])
def test_what_is_no_hint_file_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "hints").write_text(text)
    assert age_and_lifetime(tmp_path / "hints") is None
    assert age_and_lifetime(tmp_path / "none") is None


def test_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hint, "CHECK_SECONDS", 0.05)
    path = tmp_path / "hints"
    hints(path)
    assert not virtual_time.run(hint.is_silent(path, 1000.0))
    hints(path, 20.0)
    assert virtual_time.run(hint.is_silent(path, 15.0))
    path.unlink()
    assert virtual_time.run(hint.is_silent(path, 0.2))

    async def it_comes_back() -> bool:
        looks = asyncio.create_task(hint.is_silent(path, 1000.0))
        await asyncio.sleep(0.1)
        hints(path)
        return await looks

    hints(path, 20.0)
    assert not virtual_time.run(it_comes_back())


class _Slurm:
    def __init__(self, *jobs: SlurmJob) -> None:
        self.listed = jobs
        self.released: list[tuple[str, str]] = []

    async def list_jobs(self) -> list[SlurmJob]:
        return list(self.listed)

    async def release_job(self, job: str, comment: str) -> None:
        if job == "gone":
            raise CachefsError("scontrol: Invalid job id specified")
        self.released.append((job, comment))


HELD = SlurmJob("slurm:1", "1", JobTag("a", held=True), "anna", 0, 1, waiting=True, nodes=(), eligible=0, held=True,
                admin_comment="cachefs:a,policy=suspend,held=yes")  # fmt: skip


def test_only_jobs_that_we_hold_are_released() -> None:
    by_user = replace(HELD, id="2", tag=JobTag("a"))
    slurm = _Slurm(HELD, by_user, replace(HELD, id="3", held=False), replace(HELD, id="4", tasks="1-50"))
    assert virtual_time.run(hint.release_all(slurm)) == 2  # type: ignore[arg-type]
    assert slurm.released == [("1", "cachefs:a,policy=suspend"), ("4", "cachefs:a,policy=suspend")]


def test_a_job_that_cannot_be_released_keeps_no_other_one() -> None:
    slurm = _Slurm(replace(HELD, id="gone"), HELD)
    with pytest.raises(
        CachefsError, match=r"^1 jobs were released, and some are perhaps still held: scontrol: Invalid"
    ):
        virtual_time.run(hint.release_all(slurm))  # type: ignore[arg-type]
    assert [job for job, _ in slurm.released] == ["1"]
