import pytest

from cachefs_daemon.web.paging import PAGE_ROWS, RowPage, page_of


@pytest.mark.parametrize(("items", "page", "found"), [
    (0, 0, RowPage([], 0, 1, 0)),
    (5, 0, RowPage([0, 1, 2, 3, 4], 0, 1, 5)),
    (PAGE_ROWS + 1, 1, RowPage([PAGE_ROWS], 1, 2, PAGE_ROWS + 1)),
    (PAGE_ROWS + 1, 99, RowPage([PAGE_ROWS], 1, 2, PAGE_ROWS + 1)),
    (PAGE_ROWS, -1, RowPage(list(range(PAGE_ROWS)), 0, 1, PAGE_ROWS)),
])  # fmt: skip
def test_a_page_of_a_list(items: int, page: int, found: RowPage[int]) -> None:
    assert page_of(range(items), page) == found
