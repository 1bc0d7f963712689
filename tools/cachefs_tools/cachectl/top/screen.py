"""Shows pictures on the terminal, and handles keys."""

import asyncio
import signal
import time
from functools import partial
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input

from cachefs.formatting import format_duration
from cachefs_tools.cachectl.top.frame import DrawingArea, RenderedFrame, ShownNode, render_frame
from cachefs_tools.cachectl.top.glyphs import Glyphs, glyphs_for
from cachefs_tools.cachectl.top.history import RateHistory
from cachefs_tools.cachectl.top.lists import END, TopState
from cachefs_tools.cachectl.top.picture import PictureSource

# Seconds between checks for a new picture, and seconds without one after which the screen says so.
_CHECK_SECONDS: Final = 0.2
_SILENT_SECONDS: Final = 3.0
_PAGE: Final = 10


class Canvas(Widget, can_focus=True):
    """Lines of text. Only changed lines are sent to the terminal, which may be far away."""

    def __init__(self) -> None:
        super().__init__()
        self._strips: list[Strip] = []

    def show(self, lines: list[Text]) -> None:
        """Show these lines, from the top."""
        before, self._strips = self._strips, [Strip(list(line.render(self.app.console))) for line in lines]
        for y, strip in enumerate(self._strips):
            if y >= len(before) or before[y] != strip:
                self.refresh(Region(0, y, self.size.width, 1))

    def redraw_all(self) -> None:
        """Redraw everything: the terminal has lost its contents."""
        self.app.refresh(repaint=True, layout=True)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        strip = self._strips[y] if y < len(self._strips) else Strip([])
        return strip.adjust_cell_length(self.size.width)


class TopApp(App[None]):
    """The application."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Canvas { height: 1fr; width: 1fr; }
    Input { dock: bottom; height: 1; border: none; padding: 0; display: none; }
    Input:focus { border: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "quit", priority=False),
        Binding("ctrl+z", "suspend_process"),
        Binding("tab", "go(1)", priority=True),
        Binding("shift+tab", "go(-1)", priority=True),
        Binding("down,j", "move(1)"),
        Binding("up,k", "move(-1)"),
        Binding("pagedown,space", f"move({_PAGE})"),
        Binding("pageup", f"move(-{_PAGE})"),
        Binding("home", f"move(-{END})"),
        Binding("end", f"move({END})"),
        Binding("enter", "open"),
        Binding("escape", "leave", priority=True),
        Binding("s", "sort"),
        Binding("r", "turn"),
        Binding("slash", "filter"),
        Binding("question_mark,h", "help"),
    ]

    def __init__(self, asker: PictureSource, history: RateHistory, pen: Glyphs) -> None:
        """asker: has its first picture, which is in *history*."""
        super().__init__(ansi_color=True)
        self.source = asker
        self._history = history
        self._pen = pen
        self._state = TopState()
        self._drawn_number = asker.result.number
        self._frame: RenderedFrame | None = None
        self._drawn_problem = ""  # the problem on the screen

    def compose(self) -> ComposeResult:
        yield Canvas()
        yield Input(placeholder="text in a name or state; Enter keeps it, Esc shows all", compact=True)

    def on_mount(self) -> None:
        self.query_one(Canvas).focus()
        self.source.visible_datasets = self._datasets
        self.set_interval(_CHECK_SECONDS, self._check_for_picture)
        self.app_resume_signal.subscribe(self, lambda _: self.query_one(Canvas).redraw_all())

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw_picture)

    def _datasets(self) -> list[str]:
        return list(self._frame.datasets) if self._frame is not None else []

    def _check_for_picture(self) -> None:
        result = self.source.result
        if result.number != self._drawn_number:
            self._drawn_number = result.number
            if not result.problem and result.picture is not None:
                self._history.add_picture(result.picture)
            self.draw_picture()
        elif self._problem() != self._drawn_problem:
            self.draw_picture()

    def _problem(self) -> str:
        result = self.source.result
        silent = time.monotonic() - result.picture.when if result.picture is not None else 0.0
        if result.problem:
            return result.problem
        if silent > _SILENT_SECONDS + self.source.interval:
            return f"the daemon has not answered for {format_duration(silent)}"
        return ""

    def draw_picture(self) -> None:
        """Draw the present picture."""
        picture, canvas = self.source.result.picture, self.query_one(Canvas)
        if picture is None or not canvas.size.height:
            return
        self._drawn_problem = self._problem()
        sheet = DrawingArea(canvas.size.width, canvas.size.height, self._pen)
        self._frame = render_frame(ShownNode(picture, self._history, self._drawn_problem), self._state, sheet)
        canvas.show(self._frame.lines)

    # --- keys -------------------------------------------------------------------------------------------------------

    def action_go(self, steps: int) -> None:
        self._state.change_list(steps)
        self.draw_picture()

    def action_move(self, by: int) -> None:
        if self._frame is not None:
            self._state.move_cursor(self._frame.rows, by)
        self.draw_picture()

    def action_open(self) -> None:
        if self._frame is not None:
            self._state.open_job(self._frame.rows)
        self.draw_picture()

    def action_leave(self) -> None:
        field = self.query_one(Input)
        if field.display:
            field.clear()
            self._close(field)
        self._state.go_back()
        self.draw_picture()

    def action_sort(self) -> None:
        picture = self.source.result.picture
        if picture is not None:
            listings = ShownNode(picture, self._history).lists(self._pen)
            self._state.next_order(listings[self._state.list_kind].orders)
        self.draw_picture()

    def action_turn(self) -> None:
        self._state.reverse_order()
        self.draw_picture()

    def action_help(self) -> None:
        self._state.toggle_help()
        self.draw_picture()

    def action_filter(self) -> None:
        field = self.query_one(Input)
        field.display = True
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._state.filter_text = event.value
        self.draw_picture()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._close(event.input)
        self.draw_picture()

    def _close(self, field: Input) -> None:
        field.display = False
        self.query_one(Canvas).focus()


def run(asker: PictureSource, history: RateHistory) -> int:
    """Run until the user quits, or a signal arrives; the terminal is then restored. Returns the exit status. Raises
    CachefsError if there is no first picture."""
    history.add_picture(asker.fetch_first())
    asker.start()
    top = TopApp(asker, history, glyphs_for())
    try:
        asyncio.run(_run(top))
    finally:
        asker.stop()
    return top.return_code or 0


async def _run(top: TopApp) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        loop.add_signal_handler(number, partial(top.exit, return_code=128 + number))
    # Without mouse support the terminal's own selection works.
    await top.run_async(mouse=False)
