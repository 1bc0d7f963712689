"""What tests of several directories need: real servers, which are started once per session, and a place for a store.

Where a server is not installed, the tests that need it fail with the line that installs it.
"""

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import page_cache_lock, taken_pages
from tests.blockstore import memory_directory
from tests.daemon import Daemon, shared_daemon
from tests.second_chance import SEPARATE
from tests.servers import radosgw as radosgw_server
from tests.servers import rclone as rclone_server
from tests.servers.s3 import S3Server
from tests.warm_python import WarmPython, warm_torch

# How long an example takes says how busy the machine is, and nothing about what is tested. `make soak` tries more.
settings.register_profile("any machine", deadline=None, max_examples=25)
settings.register_profile("soak", deadline=None, max_examples=1000)
settings.load_profile("any machine")

# A shell's background jobs have SIGINT ignored, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that start real processes take up to two minutes each, the others seconds.
_LONG_FILES = (
    "tests/node/",
    "tests/field/",
    "tests/cluster/",
    "tests/scheduler/",
    "tests/faults/",
    "tests/unit/test_packaging.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests for any worker first, then long files. Short files fill up the rest, so no processor idles at the end.

    The Makefile tells xdist to keep this order; its own begins with the files that have the most tests.
    """
    items.sort(key=lambda item: (not item.nodeid.startswith(SEPARATE), not item.nodeid.startswith(_LONG_FILES)))


def pytest_collection_finish() -> None:
    """Have the garbage collector leave out what was imported and collected: it stays to the end."""
    gc.collect()
    gc.freeze()


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Tests that count pages know of machines that take them."""
    if "steady_page_cache" not in getattr(item, "fixturenames", ()):
        return None
    taken_pages.run(item, nextitem)
    return True


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory for a store."""
    with memory_directory() as directory:
        yield directory


@pytest.fixture
def steady_page_cache() -> Iterator[None]:
    """For tests that count pages: no other test empties the page cache of the machine meanwhile."""
    with page_cache_lock.steady_page_cache():
        yield


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon for all tests of a file."""
    with Daemon(tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture
def daemon(request: pytest.FixtureRequest, running: Daemon, tmp_path: Path) -> Iterator[Daemon]:
    """The daemon of the file, empty; a new one where the test has the marker `own_daemon`."""
    with shared_daemon(request, lambda: running, lambda: Daemon(tmp_path / "node")) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def radosgw() -> S3Server:
    """An S3 server that does everything right. All tests share it, so each makes a bucket with a name of its own."""
    return radosgw_server.shared()


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server that ignores If-Match and answers ranges with status 200."""
    with rclone_server.running(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def torch_jobs() -> WarmPython:
    """Starts jobs that need torch, without importing it for each."""
    return warm_torch()
