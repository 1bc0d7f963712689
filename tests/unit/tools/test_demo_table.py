"""The demo's table, with figures as wide as they get, on a terminal of 80 columns."""

import io

from cachefs_tools.demo import Run, Usage, table
from cachefs_tools.reading import Pass
from rich.console import Console

WIDEST = Usage(requests=100_000, memory=10**9, ssd=0, origin=0, origin_requests=10_000)


def test_table_shows_every_heading_and_figure_in_80_columns() -> None:
    cold, fast = Pass(3000, 10**9, 30.0, 123_456.0, 0.0), Pass(3000, 10**9, 0.025, 12.0, 0.0)
    runs = [Run("epoch 1: cold", cold, WIDEST), Run("from the tiers", fast, WIDEST), Run("local overlay", fast, None)]
    screen = io.StringIO()
    Console(file=screen, width=80).print(table(runs))
    text = screen.getvalue()
    assert "…" not in text
    words = text.split()
    for expected in ("files/s", "memory", "origin", "FUSE", "120,000", "123,456", "100,000", "10,000"):
        assert expected in words
