"""Keys of `cachectl top`, on a terminal of Textual's own."""

import time
from collections.abc import Awaitable, Callable
from typing import cast

from textual.pilot import Pilot
from textual.widgets import Input

from cachefs.rpc import DaemonClient
from cachefs_tools.cachectl.top.glyphs import BLOCK_GLYPHS
from cachefs_tools.cachectl.top.picture import Picture, PictureResult, PictureSource
from cachefs_tools.cachectl.top.screen import Canvas, TopApp
from tests import virtual_time
from tests.unit.tools.pictures import history_of, picture
from tests.waiting import until_async

Keys = Callable[[TopApp, Pilot[None]], Awaitable[None]]


def screen(top: TopApp) -> str:
    canvas = top.query_one(Canvas)
    return "\n".join(canvas.render_line(y).text.rstrip() for y in range(canvas.size.height))


def cursor(top: TopApp) -> str:
    return next((line for line in screen(top).splitlines() if line.startswith(">")), "")


def tried(keys: Keys, what: Picture | None = None, size: tuple[int, int] = (80, 24)) -> TopApp:
    """A screen on which these keys were pressed. Its daemon says nothing more."""
    what = what or picture(time.monotonic(), jobs=20, datasets=30)
    asker = PictureSource(cast(DaemonClient, None), 1.0)
    asker.result = PictureResult(1, what, "")
    top = TopApp(asker, history_of(what), BLOCK_GLYPHS)

    async def run() -> None:
        async with top.run_test(size=size) as pilot:
            await pilot.pause()
            await keys(top, pilot)

    virtual_time.run(run())
    return top


def test_moving_sorting_and_opening() -> None:
    async def keys(top: TopApp, pilot: Pilot[None]) -> None:
        assert "> train-00" in cursor(top)
        await pilot.press("down", "j")
        assert "> train-02" in cursor(top)
        await pilot.press("enter")
        assert "train-02: running" in screen(top)
        assert not cursor(top)
        await pilot.press("escape", "end")
        assert "> train-19" in cursor(top)
        await pilot.press("s", "s", "home")
        assert "RATE↓" in screen(top)
        assert "> train-19" in cursor(top)
        await pilot.press("r", "home")
        assert "> train-00" in cursor(top)
        await pilot.press("tab")
        assert "> set-0000" in cursor(top)
        await pilot.press("tab")
        assert "> /mnt/0" in cursor(top)
        await pilot.press("tab", "shift+tab", "shift+tab", "pagedown")
        assert "> set-0010" in cursor(top)
        await pilot.press("enter")  # only jobs are opened
        assert "> set-0010" in cursor(top)

    tried(keys)


def test_the_filter_takes_letters_that_are_keys_elsewhere() -> None:
    async def keys(top: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("slash")
        assert top.query_one(Input).has_focus
        await pilot.press(*"rain-07q")
        assert top.is_running
        assert "none with 'rain-07q'" in screen(top)
        await pilot.press("backspace", "enter")
        assert not top.query_one(Input).display
        assert "> train-07" in cursor(top)
        assert "filter: rain-07" in screen(top)
        await pilot.press("escape")
        assert "train-00" in screen(top)
        await pilot.press("slash", "x", "escape")
        assert "filter:" not in screen(top)
        assert top.query_one(Canvas).has_focus

    tried(keys)


def test_help_is_shown_and_left() -> None:
    async def keys(top: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("question_mark")
        assert "sort the list by its next column" in screen(top)
        await pilot.press("question_mark")
        assert "train-00" in screen(top)
        await pilot.press("question_mark", "down", "escape")
        assert "train-00" in screen(top)

    tried(keys)


def test_another_size_is_another_frame() -> None:
    async def keys(top: TopApp, pilot: Pilot[None]) -> None:
        assert "s3://bucket/0" not in screen(top)
        await pilot.resize_terminal(150, 50)
        await until_async(lambda: "s3://bucket/0" in screen(top))
        await pilot.resize_terminal(30, 5)
        await until_async(lambda: "at least 40 x 10" in screen(top))
        await pilot.press("down", "s", "enter", "escape", "tab")
        await pilot.resize_terminal(80, 24)
        await until_async(lambda: "cachectl top" in screen(top))

    tried(keys, size=(60, 24))


def test_new_pictures_are_shown_and_their_absence_too() -> None:
    async def keys(top: TopApp, pilot: Pilot[None]) -> None:
        asker, old = top.source, top.source.result.picture
        assert old is not None
        asker.result = PictureResult(2, picture(old.when + 1, jobs=1, fetched_bytes=3 << 20), "")
        await until_async(lambda: "3 MiB/s" in screen(top))
        assert "train-01" not in screen(top)
        asker.result = PictureResult(3, asker.result.picture, "no daemon answers at /s")
        await until_async(lambda: "no daemon answers at /s" in screen(top))
        await pilot.press("down", "question_mark", "escape")  # keys work all the same
        asker.result = PictureResult(4, picture(old.when + 9, jobs=1, instance="another"), "")
        await until_async(lambda: "no daemon" not in screen(top))

    tried(keys)


def test_a_daemon_that_says_nothing_is_told() -> None:
    async def keys(top: TopApp, pilot: Pilot[None]) -> None:
        await until_async(lambda: "the daemon has not answered for" in screen(top))

    tried(keys, picture(-1e9))


def test_q_and_ctrl_c_quit() -> None:
    for key in ("q", "ctrl+c"):

        async def keys(_: TopApp, pilot: Pilot[None], key: str = key) -> None:
            await pilot.press(key)

        assert tried(keys).return_code == 0
