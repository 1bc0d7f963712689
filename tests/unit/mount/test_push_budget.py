"""How much of the page cache pushed pages may take: decisions about numbers, and the kernel's files behind them."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cachefs.mount.push.budget import Budget, Memory, memory
from cachefs.sizes import Share

GIB = 1 << 30
QUARTER = Share(percent=25)


def test_a_share_is_of_what_is_available_at_start() -> None:
    budget = Budget(QUARTER, [Memory(64 * GIB, 40 * GIB)])
    assert budget.now == 10 * GIB
    budget.update([Memory(64 * GIB, 60 * GIB)])
    assert budget.now == 10 * GIB


def test_the_tightest_limit_counts() -> None:
    assert Budget(QUARTER, [Memory(64 * GIB, 40 * GIB), Memory(8 * GIB, 4 * GIB)]).now == GIB
    assert Budget(Share(size=16 * GIB), [Memory(64 * GIB, 40 * GIB), Memory(10 * GIB, 4 * GIB)]).now == 3 * GIB


def test_a_tenth_of_the_memory_stays_for_others() -> None:
    budget = Budget(Share(size=8 * GIB), [Memory(40 * GIB, 30 * GIB)])
    budget.update([Memory(40 * GIB, 6 * GIB)])
    assert budget.now == 2 * GIB
    budget.update([Memory(40 * GIB, 3 * GIB)])
    assert budget.now == 0


def test_it_grows_back_slowly() -> None:
    budget = Budget(Share(size=8 * GIB), [Memory(40 * GIB, 30 * GIB)])
    budget.update([Memory(40 * GIB, 4 * GIB)])
    seconds = 0
    while budget.now < 8 * GIB:
        before = budget.now
        budget.update([Memory(40 * GIB, 30 * GIB)])
        assert before < budget.now <= before + 8 * GIB // 50
        seconds += 1
    assert 50 <= seconds <= 51


@given(
    st.one_of(st.builds(Share, size=st.integers(0, 1 << 40)), st.builds(Share, percent=st.floats(0.01, 100))),
    st.lists(st.tuples(st.integers(1 << 20, 1 << 40), st.integers(-GIB, 1 << 40)), min_size=1),
)
def test_it_never_leaves_its_bounds(share: Share, states: list[tuple[int, int]]) -> None:
    budget = Budget(share, [Memory(*states[0])])
    for total, available in states:
        budget.update([Memory(total, available)])
        assert 0 <= budget.now <= max(0, min(budget.most, available - total // 10))


def test_memory_is_read_from_the_kernel_s_files(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal:       33554432 kB\nMemFree:  1 kB\nMemAvailable:   16777216 kB\n")
    assert memory(tmp_path, tmp_path) == [Memory(32 * GIB, 16 * GIB)]
    (tmp_path / "self/cgroup").write_text("0::/job\n")
    (tmp_path / "job").mkdir()
    (tmp_path / "job/memory.max").write_text(f"{4 * GIB}\n")
    # Pages of files, and so those that were pushed, can be had back.
    (tmp_path / "job/memory.stat").write_text(f"anon {GIB}\nfile {2 * GIB}\n")
    assert memory(tmp_path, tmp_path) == [Memory(32 * GIB, 16 * GIB), Memory(4 * GIB, 3 * GIB)]
    (tmp_path / "job/memory.max").write_text(f"{64 * GIB}\n")
    assert len(memory(tmp_path, tmp_path)) == 1


def test_this_machine_has_some() -> None:
    found = memory()
    assert 0 < found[0].available < found[0].total
