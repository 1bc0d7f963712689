"""Schedules make garbage in large amounts: all tests of a file share one setting of Python's collector."""

from collections.abc import Iterator

import pytest

from tests.simulation.cluster import collected_rarely


@pytest.fixture(scope="module", autouse=True)
def garbage_is_collected_rarely() -> Iterator[None]:
    with collected_rarely():
        yield
