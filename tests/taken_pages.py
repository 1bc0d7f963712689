"""Machines that take pages out of the page cache at any time, and the tests that count such pages.

Virtual machines of some providers let DAMON reclaim what the kernel believes to be idle, though most memory is free. On
one of them 1 to 7 % of all pages that had just been read were gone every 5 s. No call keeps pages from that. A test
that counts pages, or requests for pages, then fails without a fault of its own or of cachefs. So on a machine that has
been seen to do this, such a test has several tries, each with fixtures of its own. Elsewhere it has one.
"""

import functools
import os
import tempfile
import time
from typing import Final

import pytest
from _pytest.runner import CallInfo, runtestprotocol

from cachefs.mount.page_residency import PAGE, resident_pages

# Tries of one test, and seconds after which there is none any more: all tries share pytest's timeout of the test.
_TRIES: Final = 5
_SECONDS: Final = 150.0
# Seconds in which such a machine certainly takes some pages.
_SURE: Final = 11.0
# Of the file that is watched.
_BYTES: Final = 8 << 20


class _Watched:
    """A file that nobody touches. Whoever drops its pages is the kernel."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(dir="/var/tmp")  # noqa: SIM115  # /tmp may be in memory
        self._file.write(bytes(_BYTES))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._seen = False

    def seen(self, seconds: float = 0) -> bool:
        """Has the kernel taken pages, or does it in so many seconds?"""
        deadline = time.monotonic() + seconds
        while not self._seen:
            self._seen = resident_pages(self._file.fileno(), 0, _BYTES) * PAGE < _BYTES
            if time.monotonic() >= deadline:
                break
            time.sleep(0.2)
        return self._seen


_watched: _Watched | None = None


def run(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Run a test that counts pages, as pytest runs any other, and again where that may be the machine's fault."""
    global _watched
    _watched = _watched or _Watched()
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    began = time.monotonic()
    for left in reversed(range(_TRIES)):
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        failed = [report for report in reports if report.failed]
        if not failed or not left or time.monotonic() - began > _SECONDS or not _watched.seen(_SURE):
            break
        error = failed[0].longreprtext.strip().rpartition("\n")[2]
        item.warn(pytest.PytestWarning(f"run again, on a machine that takes pages out of the page cache: {error}"))
        if ended := _end_module(item):
            reports.append(ended)
            break
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _end_module(item: pytest.Item) -> pytest.TestReport | None:
    """Tear down what the module of *item* has set up, as the failed try has changed it: the next try would find a
    dataset that was added already. Returns the report of a teardown that failed."""
    module = item.getparent(pytest.Module)
    assert module is not None
    end = functools.partial(item.session._setupstate.teardown_exact, module.parent)  # type: ignore[arg-type]
    call = CallInfo.from_call(end, "teardown")
    return pytest.TestReport.from_item_and_call(item, call) if call.excinfo is not None else None
