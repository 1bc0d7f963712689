"""The picture of README.md: an epoch's time fed in four ways, and cold reads beside other tools.

All its figures are read from docs/benchmarks.md, which says how they were measured. `plots.py` draws it anew.
"""

import re
from pathlib import Path
from typing import Final, NamedTuple

BENCHMARKS: Final = Path(__file__).parents[1] / "benchmarks.md"
WAYS: Final = {
    "S3, no cachefs": "S3, one GET per sample",
    "cachefs mount": "cachefs, only mounted",
    "cachefs run": "cachefs run",
    "local disk": "a copy on the local disk",
}
READERS: Final = ("one reader, shuffled", "four readers, shuffled", "cp -r")
_STYLE: Final = """<style>
text { font: 13px system-ui, sans-serif; fill: #1f2933; }
.head { font-size: 15px; font-weight: 600; }
.name { font-weight: 600; }
.dim { fill: #5f6c7b; }
.end { text-anchor: end; }
.paper { fill: #ffffff; }
.computing { fill: #2a9d8f; }
.waiting { fill: #e76f51; }
.other { fill: #8895a7; }
.one { stroke: #5f6c7b; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .dim { fill: #9aa7b4; } .paper { fill: #0d1117; }
}
</style>"""
_LEFT: Final = 230
_PER_SECOND: Final = 48.0
_PER_FACTOR: Final = 66.0


class Epoch(NamedTuple):
    seconds: float
    waiting: float  # the part of the seconds in which the training loop waits


def demo_epochs(page: str) -> dict[str, list[Epoch]]:
    """Return the two epochs of each way in which `make demo` feeds its training loop."""
    found: dict[str, list[Epoch]] = {}
    for way in WAYS:
        after = page.partition(f"\n    {way}  ")[2]
        epochs = re.findall(r"epoch \d  [█░]+ +([\d.]+) s +(\d+) %", after)[:2]
        found[way] = [Epoch(float(seconds), int(percent) / 100) for seconds, percent in epochs]
    return found


def cold_factors(page: str) -> list[tuple[float, float]]:
    """Return how many times as many files per second cachefs reads as rclone and as s3fs, for each of READERS."""
    row = re.search(r"beside rclone, s3fs \|(.+)\|$", page, re.MULTILINE)
    assert row is not None
    cells = [re.findall(r"([\d.]+) x", cell) for cell in row[1].split("|")]
    return [(float(rclone), float(s3fs)) for rclone, s3fs in cells]


def picture(page: str) -> str:
    """Return the picture as SVG. page: docs/benchmarks.md."""
    lines = [_text(24, 30, "Time of an epoch, in seconds: 1,000 files, 5 ms of computing each", "head")]
    lines += [
        _box(440, 42, 14, 12, "computing"), _text(460, 53, "computing"),
        _box(550, 42, 14, 12, "waiting"), _text(570, 53, "waiting for samples"),
        _text(24, 53, "S3 server: 25 ms, 40 MB/s. First epoch above, second below", "dim"),
    ]  # fmt: skip
    y = 70
    for way, epochs in demo_epochs(page).items():
        lines.append(_text(24, y + 21, WAYS[way], "name" if way == "cachefs run" else ""))
        for epoch in epochs:
            computing = epoch.seconds * (1 - epoch.waiting) * _PER_SECOND
            waiting = epoch.seconds * epoch.waiting * _PER_SECOND
            lines += [_box(_LEFT, y, computing, 14, "computing"), _box(_LEFT + computing, y, waiting, 14, "waiting")]
            lines.append(_text(_LEFT + computing + waiting + 8, y + 12, f"{epoch.seconds:.1f}"))
            y += 17
        y += 10
    y += 24
    lines.append(_text(24, y, "Files per second of a cold mount: cachefs / another mount of the same server", "head"))
    lines.append(_text(24, y + 22, "300 files of 110 KB, nothing published. JuiceFS: not measured", "dim"))
    y += 36
    first = y
    for readers, factors in zip(READERS, cold_factors(page), strict=True):
        lines.append(_text(24, y + 21, readers))
        for tool, factor in zip(("rclone mount", "s3fs"), factors, strict=True):
            width = factor * _PER_FACTOR
            lines += [_box(_LEFT, y, width, 14, "other"), _text(_LEFT + width + 8, y + 12, f"{factor} x {tool}")]
            y += 17
        y += 10
    lines.append(f'<path class="one" d="M{_LEFT + _PER_FACTOR:.1f} {first - 4}V{y - 6}"/>')
    lines.append(_text(24, y + 14, "Source: docs/benchmarks.md (make demo, cachefs-bench miss)", "dim"))
    height = y + 30
    title = "cachefs: time of an epoch beside S3 and a local copy, and cold reads beside rclone and s3fs"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" width="860" height="{height}"',
            'role="img" aria-labelledby="t">',
            f'<title id="t">{title}</title>', _STYLE,
            f'<rect class="paper" width="860" height="{height}" rx="8"/>', *lines, "</svg>", "",
        ]
    )  # fmt: skip


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    styled = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y}"{styled}>{text}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"/>'
