"""The lines of `cachectl top`: they fit every terminal, and show what matters."""

import io

import pytest

from cachefs.job_messages import JobList
from cachefs.messages import ClusterBrief
from cachefs_tools.cachectl.top.frame import DrawingArea, RenderedFrame, ShownNode, render_frame
from cachefs_tools.cachectl.top.glyphs import ASCII_GLYPHS, BLOCK_GLYPHS, Glyphs, glyphs_for
from cachefs_tools.cachectl.top.history import RateHistory
from cachefs_tools.cachectl.top.lists import END, ListKind, TopState, divide_lines, first_visible
from cachefs_tools.cachectl.top.picture import Picture
from tests.unit.tools.pictures import history_of, job, picture


def drawn(
    what: Picture, state: TopState | None = None, size: tuple[int, int] = (80, 24), pen: Glyphs = BLOCK_GLYPHS
) -> RenderedFrame:
    return render_frame(ShownNode(what, history_of(what)), state or TopState(), DrawingArea(*size, pen))


def text(made: RenderedFrame) -> str:
    return "\n".join(line.plain for line in made.lines)


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (60, 16), (79, 24), (132, 43), (250, 80), (20, 3)])
@pytest.mark.parametrize("pen", [BLOCK_GLYPHS, ASCII_GLYPHS])
def test_a_frame_is_as_large_as_the_terminal(size: tuple[int, int], pen: Glyphs) -> None:
    cluster = ClusterBrief(name="c", source="etcd", states={"active": 3})
    for what in (
        picture(), picture(datasets=0, jobs=0, mounts=[]), picture(datasets=1000, jobs=64, cluster=cluster),
    ):  # fmt: skip
        for state in (
            TopState(),
            TopState(is_help_open=True),
            TopState(opened_job="train-00"),
            TopState(list_kind=ListKind.MOUNTS, filter_text="x"),
        ):
            made = drawn(what, state, size, pen)
            assert len(made.lines) <= size[1]
            assert [line.plain for line in made.lines if line.cell_len > size[0]] == []
            if pen is ASCII_GLYPHS:
                assert text(made).isascii()


def test_what_matters_is_on_a_small_terminal() -> None:
    made = text(drawn(picture(datasets=3, jobs=2)))
    for said in (
        "cachefsd 1.2.3, up 1 h 2 min", "700 MiB of 1 GiB  68 %", "origin", "train-01", "███░░░░░░░░░  25 %", "101/s",
        "WAITED", "set-0002", "████████████ 100 %", "/mnt/0", "alive", "q quit",
    ):  # fmt: skip
        assert said in made, made
    assert "peers" not in made  # the node is in no cluster
    assert "peers" in text(drawn(picture(cluster=ClusterBrief(name="c", source="etcd"))))


def test_a_larger_terminal_shows_more() -> None:
    small, large = (drawn(picture(datasets=100, jobs=64), size=size) for size in ((60, 24), (160, 60)))
    assert "s3://bucket" in text(large)
    assert "s3://bucket" not in text(small)
    assert len(large.datasets) > 2 * len(small.datasets) > 2


def test_of_many_items_the_cursor_is_always_seen() -> None:
    state, what = TopState(), picture(jobs=64, datasets=1000)
    for key, seen in (("end", "train-63"), ("up", "train-62"), ("home", "train-00"), ("down", "train-01")):
        state.move_cursor(drawn(what, state).rows, {"end": END, "home": -END, "up": -1, "down": 1}[key])
        assert [line for line in text(drawn(what, state)).splitlines() if line.startswith(f"> {seen}")], key
    state.change_list(1)
    state.move_cursor(drawn(what, state).rows, END)
    assert "> set-0999" in text(drawn(what, state))


def test_lists_are_sorted_and_turned() -> None:
    state, what = TopState(), picture(jobs=3, datasets=3)

    def first(part: ListKind) -> str:
        return drawn(what, state).rows[part][0].key

    assert first(ListKind.JOBS) == "train-00"
    state.next_order(("JOB", "DONE", "RATE"))
    state.next_order(("JOB", "DONE", "RATE"))
    assert first(ListKind.JOBS) == "train-02"  # the quickest
    assert "RATE↓" in text(drawn(what, state))
    state.reverse_order()
    assert first(ListKind.JOBS) == "train-00"
    assert "RATE↑" in text(drawn(what, state))
    state.change_list(1)
    state.next_order(("DATASET", "SIZE"))
    assert first(ListKind.DATASETS) == "set-0002"


def test_the_cursor_stays_with_its_job_when_others_come() -> None:
    state = TopState()
    state.move_cursor(drawn(picture(jobs=3), state).rows, 1)
    assert "> train-01" in text(drawn(picture(jobs=60), state))
    before = picture(jobs=0)
    jobs = JobList([job(0, "a-new-one"), job(1), job(2)])
    later = Picture(before.when, before.unix_time, before.status, jobs, before.datasets, before.cached)
    assert "> train-01" in text(drawn(later, state))


def test_the_filter_leaves_out_rows() -> None:
    made = drawn(picture(jobs=20, datasets=20), TopState(filter_text="0007"))
    assert [row.key for row in made.rows[ListKind.DATASETS]] == ["set-0007"]
    assert made.rows[ListKind.JOBS] == []
    assert "none with '0007'" in text(made)
    assert "filter: 0007" in text(made)


def test_names_are_shown_as_one_safe_line() -> None:
    evil = "a\x1b[2Jb\nc" + "ü" * 200 + "数据集"
    before = picture()
    what = Picture(
        before.when, before.unix_time, before.status, JobList([job(0, evil)]), before.datasets, before.cached
    )
    made = drawn(what)
    assert "\x1b" not in text(made)
    assert len(made.lines) == 24
    assert all(line.cell_len <= 80 for line in made.lines)
    assert "\x1b" not in text(drawn(what, TopState(opened_job=evil)))


def test_one_job_alone() -> None:
    made = text(drawn(picture(jobs=3), TopState(opened_job="train-01")))
    assert "train-01: running" in made
    assert "set-0000" not in made
    assert "there is no job gone any more" in text(drawn(picture(), TopState(opened_job="gone")))


def test_an_old_picture_says_so() -> None:
    history, what = RateHistory(), picture()
    made = render_frame(
        ShownNode(what, history, "no daemon answers at /s"), TopState(), DrawingArea(80, 24, BLOCK_GLYPHS)
    )
    assert "no daemon answers at /s" in made.lines[1].plain
    assert len(made.lines) == 24


def test_room_is_shared_fairly() -> None:
    assert divide_lines(12, [3, 2, 1], 0) == [3, 2, 1]
    assert divide_lines(12, [64, 1000, 1], 0) == [6, 5, 1]
    assert divide_lines(12, [64, 1000, 1], 1) == [5, 6, 1]
    assert divide_lines(2, [64, 1000, 40], 2) == [1, 0, 1]
    assert divide_lines(0, [1, 1, 1], 0) == [0, 0, 0]
    assert divide_lines(-3, [1, 1, 1], 0) == [0, 0, 0]
    assert [first_visible(cursor, 10, 4, 3) for cursor in (0, 3, 6, 7, 9)] == [0, 3, 3, 4, 6]
    assert first_visible(0, 0, 4, 9) == 0


def test_a_bar_is_full_and_empty_only_where_its_whole_is() -> None:
    assert [BLOCK_GLYPHS.draw_bar(part, 4) for part in (0, 0.001, 0.5, 0.999, 1, 7)] == [
        "░░░░", "█░░░", "██░░", "███░", "████", "████",
    ]  # fmt: skip
    assert BLOCK_GLYPHS.draw_curve([0, 1, 50, 100], 6) == "   ▁▄█"
    assert ASCII_GLYPHS.draw_curve([0, 1, 50, 100], 6) == "   _=#"


def test_only_terminals_that_have_them_get_block_characters() -> None:
    class Screen(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    def pen(encoding: str, term: str) -> Glyphs:
        return glyphs_for(Screen(io.BytesIO(), encoding=encoding), {"TERM": term})

    assert pen("utf-8", "xterm-256color") is BLOCK_GLYPHS
    assert pen("utf-8", "linux") is pen("utf-8", "vt100") is pen("ascii", "xterm") is ASCII_GLYPHS
