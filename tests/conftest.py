"""Real servers, which are started once per session.

Where a server is not installed, the tests that need it fail with the line that installs it.
"""

from collections.abc import Iterator

import pytest

from tests import page_cache_lock
from tests.servers import radosgw as radosgw_server
from tests.servers import rclone as rclone_server
from tests.servers.s3 import S3Server


@pytest.fixture
def steady_page_cache() -> Iterator[None]:
    """For tests that count pages: no other test empties the page cache of the machine meanwhile."""
    with page_cache_lock.steady_page_cache():
        yield


@pytest.fixture(scope="session")
def radosgw() -> Iterator[S3Server]:
    """An S3 server that does everything right. All tests share it, so each makes a bucket with a name of its own."""
    with radosgw_server.running() as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server that ignores If-Match and answers ranges with status 200."""
    with rclone_server.running(tmp_path_factory.mktemp("rclone")) as server:
        yield server
