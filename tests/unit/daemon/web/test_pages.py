import pytest
from cachefs_daemon.web.pages import PAGE_ROWS, Page, page_of


@pytest.mark.parametrize(("items", "page", "found"), [
    (0, 0, Page([], 0, 1, 0)),
    (5, 0, Page([0, 1, 2, 3, 4], 0, 1, 5)),
    (PAGE_ROWS + 1, 1, Page([PAGE_ROWS], 1, 2, PAGE_ROWS + 1)),
    (PAGE_ROWS + 1, 99, Page([PAGE_ROWS], 1, 2, PAGE_ROWS + 1)),
    (PAGE_ROWS, -1, Page(list(range(PAGE_ROWS)), 0, 1, PAGE_ROWS)),
])  # fmt: skip
def test_a_page_of_a_list(items: int, page: int, found: Page[int]) -> None:
    assert page_of(range(items), page) == found
