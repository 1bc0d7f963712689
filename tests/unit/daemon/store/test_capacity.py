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


def test_a_little_comes_out_of_half_of_the_headroom(proc: Path, tmp_path: Path) -> None:
    """What passes through the memory tier has some room, also where memory gets short, but not when there is none."""
    (proc / "self/cgroup").write_text("0::/\n")

    def room(held: int, spare: int | None) -> int | None:
        cgroup(tmp_path / "sys", memory__max=f"{8 * GIB}\n", memory__stat=f"anon {8 * GIB - held}\n")
        return memory_room(spare=spare, proc=proc, sys=tmp_path / "sys")

    assert room(256 << 20, spare=None) == 0
    assert room(256 << 20, spare=16 << 20) == 16 << 20
    assert room(136 << 20, spare=16 << 20) == 8 << 20
    assert room(64 << 20, spare=16 << 20) == -(64 << 20)
    assert room(200 << 20, spare=-(16 << 20)) == -(16 << 20), "the tier shrinks to no less"
    assert room(512 << 20, spare=16 << 20) == 256 << 20


def test_memory_of_the_machine_stays_free(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("")
    (proc / "meminfo").write_text("MemTotal: 9000000 kB\nMemFree: 10 kB\nMemAvailable: 1048576 kB\n")
    assert memory_room(min_free=GIB // 4, proc=proc, sys=tmp_path) == 3 * GIB // 4
    assert memory_room(min_free=2 * GIB, proc=proc, sys=tmp_path) == -GIB
    assert memory_room(min_free=0, proc=proc, sys=tmp_path) is None
    (proc / "meminfo").write_text("")
    assert memory_room(min_free=GIB, proc=proc, sys=tmp_path) is None


def test_no_cgroups_no_limit(tmp_path: Path) -> None:
    assert memory_room(proc=tmp_path, sys=tmp_path) is None


def test_the_headroom_of_a_small_group_is_small(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("0::/\n")
    cgroup(tmp_path / "sys", memory__max=f"{64 << 20}\n", memory__stat="anon 0\n")
    assert memory_room(proc=proc, sys=tmp_path / "sys") == 56 << 20


def test_the_reserve_is_a_small_part_of_any_real_budget() -> None:
    assert metadata_reserve(0) > 0
    assert all(metadata_reserve(size) <= size // 100 for size in (GIB // 8, GIB, 1000 * GIB))
