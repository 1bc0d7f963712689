"""The demo's figures as an SVG, for light and dark mode, with an accessible title."""

from collections.abc import Iterator
from typing import Final
from xml.sax.saxutils import escape

from cachefs_bench.demo import results
from cachefs_bench.demo.results import DemoEpoch, DemoResult, DemoRun, sample_rates
from cachefs_bench.demo.settings import DemoSettings

# Lengths in pixels.
WIDTH: Final = 860
_LEFT: Final = 100  # begin of the bars
_BAR: Final = 490  # longest bar
_TIME: Final = 668  # right ends of the columns of figures
_WAITING: Final = 752
_REQUESTS: Final = 836
_ROW: Final = 22
_THICK: Final = 15
_LINE: Final = 40  # height of the speed curve
_INTERVALS: Final = 60
_STYLE: Final = """
text { font: 13px system-ui, sans-serif; fill: #1f2933; }
.head { font-size: 17px; font-weight: 600; }
.name { font-weight: 600; }
.dim { fill: #5f6c7b; }
.end { text-anchor: end; }
.paper { fill: #ffffff; }
.computing { fill: #2a9d8f; }
.waiting { fill: #e76f51; }
.mark { stroke: #c0392b; stroke-width: 2; stroke-dasharray: 4 3; }
.killed { fill: #c0392b; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .dim { fill: #9aa7b4; } .paper { fill: #0d1117; }
  .mark { stroke: #ff8a75; } .killed { fill: #ff8a75; }
}
"""


class _SvgDrawing:
    def __init__(self) -> None:
        self.elements: list[str] = []
        self.y = 0.0  # base line of the next element

    def text(self, x: float, text: str, style: str = "") -> None:
        self.elements.append(f'<text x="{x:.0f}" y="{self.y:.0f}" class="{style}">{escape(text)}</text>')

    def bar(self, x: float, width: float, style: str) -> None:
        """Add a rectangle on the base line."""
        self.elements.append(
            f'<rect x="{x:.1f}" y="{self.y - _THICK + 3:.0f}" width="{width:.1f}" height="{_THICK}" class="{style}"/>'
        )

    def down(self, pixels: float = _ROW) -> None:
        self.y += pixels


def draw_svg(story: DemoResult, settings: DemoSettings) -> str:
    """Return the text of an SVG file."""
    drawing = _SvgDrawing()
    drawing.down(32)
    drawing.text(24, "One training loop, fed in four ways", "head")
    for line in (results.heading(story, settings), results.store_text()):
        drawing.down(21)
        drawing.text(24, line, "dim")
    _legend(drawing)
    longest = max(epoch.trained.seconds for run in story.all_runs() for epoch in run.epochs)
    for run in story.runs:
        _draw_run(drawing, run, longest)
    drawing.down(14)
    _draw_run(drawing, story.killed, longest)
    _draw_speed(drawing, story, longest)
    drawing.down(10)
    for line in (*results.kill_lines(story), *results.verdict_lines(story)):
        drawing.down(20)
        drawing.text(24, line, "dim")
    return "\n".join(_document(drawing, results.verdict_lines(story)[0])) + "\n"


def _document(drawing: _SvgDrawing, description: str) -> Iterator[str]:
    height = drawing.y + 24
    view = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {view} role="img" aria-labelledby="t d">'
    yield '<title id="t">cachefs: time of an epoch, in which a training loop computes or waits</title>'
    yield f'<desc id="d">{escape(description)}</desc>'
    yield f"<style>{_STYLE}</style>"
    yield f'<rect class="paper" width="{WIDTH}" height="{height:.0f}" rx="8"/>'
    yield from drawing.elements
    yield "</svg>"


def _legend(drawing: _SvgDrawing) -> None:
    drawing.down(34)
    drawing.bar(_LEFT, 22, "computing")
    drawing.text(_LEFT + 28, results.COMPUTING)
    drawing.bar(_LEFT + 120, 22, "waiting")
    drawing.text(_LEFT + 148, results.WAITING)
    for x, title in ((_TIME, "time"), (_WAITING, "waiting"), (_REQUESTS, "requests")):
        drawing.text(x, title, "name end")
    drawing.down(6)


def _draw_run(drawing: _SvgDrawing, run: DemoRun, longest: float) -> None:
    drawing.down(24)
    drawing.elements.append(
        f'<text x="24" y="{drawing.y:.0f}"><tspan class="name">{escape(run.title)}</tspan>'
        f'<tspan class="dim" dx="10">{escape(run.explanation)}</tspan></text>'
    )
    for epoch in run.epochs:
        _draw_epoch(drawing, epoch, longest)


def _draw_epoch(drawing: _SvgDrawing, epoch: DemoEpoch, longest: float) -> None:
    trained = epoch.trained
    length = _BAR * trained.seconds / longest
    waiting = length * epoch.waiting
    drawing.down()
    drawing.text(36, f"epoch {trained.epoch + 1}", "dim")
    drawing.bar(_LEFT, length - waiting, "computing")
    drawing.bar(_LEFT + length - waiting, waiting, "waiting")
    drawing.text(_TIME, f"{trained.seconds:.1f} s", "end")
    drawing.text(_WAITING, f"{100 * epoch.waiting:.0f} %", "end")
    drawing.text(_REQUESTS, f"{epoch.requests:,}", "end")


def _draw_speed(drawing: _SvgDrawing, story: DemoResult, longest: float) -> None:
    epoch = story.killed.epochs[story.kill.position.epoch]
    length = _BAR * epoch.trained.seconds / longest
    speeds = sample_rates(epoch.positions, _INTERVALS)
    top = max(speeds)
    drawing.down(_LINE + 14)
    drawing.text(24, "samples/s", "dim")
    step = length / _INTERVALS
    for number, speed in enumerate(speeds):
        high = _LINE * speed / top
        drawing.elements.append(
            f'<rect x="{_LEFT + number * step:.1f}" y="{drawing.y - high:.1f}" width="{max(1.0, step - 1):.1f}"'
            f' height="{high:.1f}" class="computing"/>'
        )
    drawing.text(_LEFT + length + 10, f"in epoch {epoch.trained.epoch + 1}; {top:,.0f} at most", "dim")
    x = _LEFT + length * story.kill.position.seconds / epoch.trained.seconds
    drawing.elements.append(
        f'<line x1="{x:.1f}" y1="{drawing.y - _LINE - 6:.1f}" x2="{x:.1f}" y2="{drawing.y + 6:.1f}" class="mark"/>'
    )
    drawing.down(20)
    drawing.text(x + 4, results.KILLED_HERE, "killed")
