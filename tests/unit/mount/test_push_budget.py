"""How much of the page cache pushed pages may take: decisions about numbers, and the kernel's files behind them."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cachefs.mount.push.pusher import MemoryState, PageCacheBudget, read_memory
from cachefs.sizes import SizeSetting

GIB = 1 << 30
QUARTER = SizeSetting(percent=25)


def test_a_share_is_of_what_is_available_at_start() -> None:
    budget = PageCacheBudget(QUARTER, [MemoryState(64 * GIB, 40 * GIB)])
    assert budget.current_bytes == 10 * GIB
    budget.update_budget([MemoryState(64 * GIB, 60 * GIB)])
    assert budget.current_bytes == 10 * GIB


def test_the_tightest_limit_counts() -> None:
    assert (
        PageCacheBudget(QUARTER, [MemoryState(64 * GIB, 40 * GIB), MemoryState(8 * GIB, 4 * GIB)]).current_bytes == GIB
    )
    assert (
        PageCacheBudget(
            SizeSetting(size=16 * GIB), [MemoryState(64 * GIB, 40 * GIB), MemoryState(10 * GIB, 4 * GIB)]
        ).current_bytes
        == 3 * GIB
    )


def test_a_tenth_of_the_memory_stays_for_others() -> None:
    budget = PageCacheBudget(SizeSetting(size=8 * GIB), [MemoryState(40 * GIB, 30 * GIB)])
    budget.update_budget([MemoryState(40 * GIB, 6 * GIB)])
    assert budget.current_bytes == 2 * GIB
    budget.update_budget([MemoryState(40 * GIB, 3 * GIB)])
    assert budget.current_bytes == 0


def test_it_grows_back_slowly() -> None:
    budget = PageCacheBudget(SizeSetting(size=8 * GIB), [MemoryState(40 * GIB, 30 * GIB)])
    budget.update_budget([MemoryState(40 * GIB, 4 * GIB)])
    seconds = 0
    while budget.current_bytes < 8 * GIB:
        before = budget.current_bytes
        budget.update_budget([MemoryState(40 * GIB, 30 * GIB)])
        assert before < budget.current_bytes <= before + 8 * GIB // 50
        seconds += 1
    assert 50 <= seconds <= 51


@given(
    st.one_of(
        st.builds(SizeSetting, size=st.integers(0, 1 << 40)), st.builds(SizeSetting, percent=st.floats(0.01, 100))
    ),
    st.lists(st.tuples(st.integers(1 << 20, 1 << 40), st.integers(-GIB, 1 << 40)), min_size=1),
)
def test_it_never_leaves_its_bounds(share: SizeSetting, states: list[tuple[int, int]]) -> None:
    budget = PageCacheBudget(share, [MemoryState(*states[0])])
    for total, available in states:
        budget.update_budget([MemoryState(total, available)])
        assert 0 <= budget.current_bytes <= max(0, min(budget.max_bytes, available - total // 10))


def test_memory_is_read_from_the_kernel_s_files(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal:       33554432 kB\nMemFree:  1 kB\nMemAvailable:   16777216 kB\n")
    assert read_memory(tmp_path, tmp_path) == [MemoryState(32 * GIB, 16 * GIB)]
    (tmp_path / "self/cgroup").write_text("0::/job\n")
    (tmp_path / "job").mkdir()
    (tmp_path / "job/memory.max").write_text(f"{4 * GIB}\n")
    # Pages of files, and so those that were pushed, can be had back.
    (tmp_path / "job/memory.stat").write_text(f"anon {GIB}\nfile {2 * GIB}\n")
    assert read_memory(tmp_path, tmp_path) == [MemoryState(32 * GIB, 16 * GIB), MemoryState(4 * GIB, 3 * GIB)]
    (tmp_path / "job/memory.max").write_text(f"{64 * GIB}\n")
    assert len(read_memory(tmp_path, tmp_path)) == 1


def test_this_machine_has_some() -> None:
    found = read_memory()
    assert 0 < found[0].available < found[0].total
