"""Which files a list of paths means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs_daemon.datasets.selection import distinct, is_below, normal_path

PATHS = st.lists(st.lists(st.sampled_from([b"a", b"b", b"a-", b"a0"]), max_size=4).map(b"/".join), max_size=8)


@pytest.mark.parametrize(
    ("given", "normal"),
    [(b"", b""), (b"/", b""), (b".", b""), (b"/a//b/", b"a/b"), (b"./a/./b", b"a/b"), (b"a/..b", b"a/..b")],
)
def test_normal_form(given: bytes, normal: bytes) -> None:
    assert normal_path(given) == normal


@given(PATHS)
def test_no_distinct_path_is_below_another_and_none_is_lost(paths: list[bytes]) -> None:
    kept = distinct(paths)
    assert all(not is_below(path, top) for path in kept for top in kept if path is not top)
    assert all(any(is_below(normal_path(path), top) for top in kept) for path in paths)
    assert set(kept) <= {normal_path(path) for path in paths}
