"""Jobs on disk: what is read is what was written, and damage is noticed."""

from pathlib import Path

import pytest

from cachefs.errors import CachefsError
from cachefs.job_messages import JobPublication, SampleMap
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs_daemon.datasets.stamps import ChangeStamp
from cachefs_daemon.jobs import job_files as job_store
from cachefs_daemon.jobs.job_files import ConsumerRecord, JobFiles, JobPriority, JobRecord
from cachefs_daemon.runtime.boot_clock import BootMoment


def record(job: str = "train", orders: dict[int, bytes] | None = None, paths: int = 2) -> JobRecord:
    spec = SamplerSpec(kind="numpy", size=9, seed=2)
    consumers = [
        ConsumerRecord(
            JobPublication(job=job, dataset="d", consumer=name, spec=spec),
            0,
            "ab" * 16,
            4711,
            BootMoment(12.5, "a boot"),
            orders or {},
        )
        for name in ("0", "a strange/name")
    ]
    sample_map = SampleMap(kind="files", paths=[b"path \xff %d" % number for number in range(paths)])
    priority = JobPriority(2.5, ChangeStamp(3, nonce=7))
    return JobRecord(job, "test", 17.0, consumers, [sample_map], {"ab" * 16: 0}, priority)


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    store = JobFiles(tmp_path)
    assert store.load() == []
    records = [record(job, {3: b"1234", 4: b"5678"}) for job in ("a.job", "a", "b:+@-_")]
    for one in records:
        store.save(one)
    store.save_positions("a", {"0": (3, 70), "a strange/name": (4, 0)})
    loaded = {one.job: (one, places) for one, places in JobFiles(tmp_path).load()}
    assert loaded == {
        one.job: (one, {"0": (3, 70), "a strange/name": (4, 0)} if one.job == "a" else {}) for one in records
    }
    store.remove("a")
    assert sorted(one.job for one, _ in store.load()) == ["a.job", "b:+@-_"]


def test_every_damaged_byte_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = JobFiles(tmp_path)
    store.save(record(orders={0: bytes(40)}))
    path = tmp_path / "jobs/train.job"
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert store.load() == []
        assert not path.exists()
    for length in (0, 5, 8, 9, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert store.load() == []
    assert "its checksum is wrong" in caplog.text
    path.write_bytes(whole)
    assert [one.job for one, _ in store.load()] == ["train"]


def test_a_file_under_another_name_is_nobodys(tmp_path: Path) -> None:
    store = JobFiles(tmp_path)
    store.save(record())
    (tmp_path / "jobs/train.job").rename(tmp_path / "jobs/other.job")
    assert store.load() == []


def test_what_is_too_much_is_left_out_furthest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(job_store, "MAX_BYTES", 1000)
    store = JobFiles(tmp_path)
    store.save(record(orders={epoch: bytes(150) for epoch in range(10)}))
    [(loaded, _)] = store.load()
    assert [sorted(one.orders) for one in loaded.consumers] == [[0, 1, 2], [0, 1, 2]]
    assert [one.forgotten for one in loaded.consumers] == [[3, 4, 5, 6, 7, 8, 9]] * 2
    store.save(record(paths=1000))
    assert "sample maps are too large" in caplog.text
    assert store.load() == []


def test_a_directory_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_bytes(b"in the way")
    with pytest.raises(CachefsError, match=r"train\.job cannot be written: .*; a restart of the daemon would forget"):
        JobFiles(tmp_path).save(record())
