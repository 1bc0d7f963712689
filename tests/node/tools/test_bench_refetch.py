"""`cachefs run` fetches no more than the mount alone: cells of `cachefs-bench refetch`, with a real node and torch.

What the page cache of a real kernel keeps is counted, so no other program may drop pages meanwhile.
"""

import io
from pathlib import Path

import pytest
from rich.console import Console

from cachefs_bench import refetch
from cachefs_bench.refetch import Cell, PageCache, RefetchLoad, TierKind, table

LOAD = RefetchLoad(files=240, epochs=3, rate=120.0)


def test_the_chosen_cells_have_all_pairs_and_each_kind_of_small_tiers() -> None:
    cells = refetch.selected_cells()
    assert len(set(cells)) == len(cells) < 40
    for name, values in refetch.FIELD_VALUES.items():
        assert {getattr(cell, name) for cell in cells} == set(values)
    small = {(cell.tiers, cell.page_cache, cell.push) for cell in cells if not cell.hold_all}
    assert small >= {(tiers, pages, push) for tiers in TierKind for pages in PageCache for push in (True, False)}


@pytest.mark.usefixtures("steady_page_cache")
@pytest.mark.parametrize(
    ("cell", "most"),
    [
        # The page cache has all, and the tiers have half: once 2.5 to 3.5 times the least in 4 epochs. Now 1.0 to 1.1,
        # and more where the machine takes pages meanwhile.
        pytest.param(Cell(), 1.2, id="memory"),
        pytest.param(Cell(push=False), 1.2, id="no_push", marks=pytest.mark.soak),
        # Pages were dropped as the job began: 1.15 to 1.5.
        pytest.param(Cell(tiers=TierKind.BOTH, small_budget=True, workers=0), 1.2, id="budget", marks=pytest.mark.soak),
        pytest.param(Cell(small_budget=True, distributed=True), 1.2, id="distributed", marks=pytest.mark.soak),
        # The page cache has nothing for long: once 1.1 to 1.4 times the least.
        pytest.param(Cell(page_cache=PageCache.NONE), 1.3, id="dropped", marks=pytest.mark.soak),
    ],
)
def test_published_jobs_fetch_hardly_more_than_the_least_possible(tmp_path: Path, cell: Cell, most: float) -> None:
    document = refetch.measure(tmp_path, LOAD, [cell], lambda text: None, measures_mount=False)
    (row,) = document["cells"]
    assert row["over_least"] <= most, row
    console = Console(width=132, file=io.StringIO(), record=True)
    console.print(table(document))
    assert f"{row['run']['fetched']:.2f}" in console.export_text()
