"""Cgroup limits, from trees as the kernel shows them."""

from pathlib import Path

import pytest
from cachefs_daemon.store.capacity import memory_room, metadata_reserve

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path / "proc"


def cgroup(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


def test_v2_the_tightest_of_the_groups_above_counts(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("0::/slice/pod\n")
    cgroup(tmp_path / "sys/slice", memory__max=f"{4 * GIB}\n", memory__stat=f"anon {3 * GIB}\nfile {2 * GIB}\n")
    cgroup(tmp_path / "sys/slice/pod", memory__max=f"{2 * GIB}\n", memory__stat=f"anon {GIB // 4}\nshmem {GIB // 4}\n")
    assert memory_room(proc=proc, sys=tmp_path / "sys") == GIB - GIB // 4
    cgroup(tmp_path / "sys/slice/pod", memory__max="max\n")
    assert memory_room(proc=proc, sys=tmp_path / "sys") == GIB - GIB // 4
    cgroup(tmp_path / "sys/slice", memory__max="max\n")
    assert memory_room(proc=proc, sys=tmp_path / "sys") is None


def test_v1_inside_a_container_only_the_root_of_the_tree_is_there(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("5:cpu:/docker/1\n4:memory:/docker/1\n0::/docker/1\n")
    stat = f"rss 5\ntotal_rss {GIB}\ntotal_shmem {GIB}\n"
    cgroup(tmp_path / "sys/memory", memory__limit_in_bytes=f"{2 * GIB}\n", memory__stat=stat)
    assert memory_room(proc=proc, sys=tmp_path / "sys") == -(256 << 20)
    cgroup(tmp_path / "sys/memory", memory__limit_in_bytes="9223372036854771712\n")
    assert memory_room(proc=proc, sys=tmp_path / "sys") is None


def test_no_cgroups_no_limit(tmp_path: Path) -> None:
    assert memory_room(proc=tmp_path, sys=tmp_path) is None


def test_the_headroom_of_a_small_group_is_small(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("0::/\n")
    cgroup(tmp_path / "sys", memory__max=f"{64 << 20}\n", memory__stat="anon 0\n")
    assert memory_room(proc=proc, sys=tmp_path / "sys") == 56 << 20


def test_the_reserve_is_a_small_part_of_any_real_budget() -> None:
    assert metadata_reserve(0) > 0
    assert all(metadata_reserve(size) <= size // 100 for size in (GIB // 8, GIB, 1000 * GIB))
