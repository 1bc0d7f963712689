"""A second chance for tests that failed beside others: each is run once more, alone, in a process of its own.

`make test` loads this plugin of pytest (docs/contributing.md says why). Where all of them pass alone, the run passes;
the end of its output then names each of them, with the error of the first time. The run fails

- where a test fails again,
- where more than LIMIT tests failed: then it is not chance, and none is run again,
- where anything else went wrong: a file that cannot be imported, a test that did not run, an internal error.

A worker of xdist that crashed counts as a failure of the test that it ran.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Generator, Iterable
from typing import Any, Final

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

LIMIT: Final = 2
VERDICT: Final = "unsteady: failed beside others, passed alone"
# Tests that need no fixture of their file, and take a processor for seconds each.
SEPARATE: Final = "tests/simulation/"
# Seconds after which a test that runs alone is given up. It is above pytest's own timeout of a test.
_ALONE_SECONDS: Final = 600.0
# Categories of pytest's last line in which a test's first result may have been counted.
_FIRST_RESULTS: Final = ("failed", "error", "passed")


class Files(LoadFileScheduling):
    """What xdist does for `--dist loadfile`, but the tests of SEPARATE go to any worker, and a run in which a worker
    crashes goes on.

    xdist (3.8) gives all files of the lost worker to others, those that it had finished too, and the test that crashed.
    Its successor begins with a finished file, has nothing to do, and waits for ever for more; so does the run.
    """

    def _split_scope(self, nodeid: str) -> str:
        """Return the name of the tests that one worker runs: a file, or one test where tests share nothing."""
        return nodeid if nodeid.startswith(SEPARATE) else super()._split_scope(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        work = self.assigned_work[node]
        for file in [file for file, tests in work.items() if all(tests.values())]:
            del work[file]
        if not work:
            return super().remove_node(node)
        del self.assigned_work[node]
        first = next(iter(work.values()))
        crashed: str = next(test for test, ended in first.items() if not ended)
        first[crashed] = True  # it has its second chance alone
        self.workqueue.update((file, tests) for file, tests in work.items() if not all(tests.values()))
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        """A worker begins a test when it knows the next one, so one test alone is not enough work."""
        if node not in self.registered_collections:
            return  # It takes the place of a worker that has crashed, and has not collected yet.
        # A worker that has just crashed cannot be sent any. What it was to get is given to others when that is noticed.
        with contextlib.suppress(OSError):
            super()._reschedule(node)
            while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)


class SecondChance:
    """What is remembered of one run. Only the process that prints has one, not the workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._collected: set[str] = set()  # node ids of all tests
        self._ended: set[str] = set()  # of those that have a result
        self._failed: dict[str, pytest.TestReport] = {}  # first failure by node id
        self._files_failed = False
        self._unsteady: dict[str, pytest.TestReport] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> "Files | None":
        return Files(config, log) if config.getoption("dist") == "loadfile" else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        self._collected.update(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._files_failed |= report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.setdefault(report.nodeid, report)
        if report.when == "call" or not report.passed:
            self._ended.add(report.nodeid)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, object, object]:
        # Behind the yield the workers are gone, and the last lines are not written yet.
        result = yield
        if exitstatus == pytest.ExitCode.TESTS_FAILED and self._failed:
            try:
                self._try_again(session)
            except KeyboardInterrupt:
                session.exitstatus = pytest.ExitCode.INTERRUPTED
        return result

    def _try_again(self, session: pytest.Session) -> None:
        self._say("")  # the line of dots has not ended
        if self._files_failed or self._collected - self._ended:
            self._say("no second chance: not all tests could be run")
            return
        if len(self._failed) > LIMIT:
            self._say(f"no second chance: {len(self._failed)} tests failed, and more than {LIMIT} are not chance")
            return
        for number, (nodeid, report) in enumerate(self._failed.items()):
            if self._passes_alone(nodeid, number):
                self._unsteady[nodeid] = report
        self._correct_counts()
        if len(self._unsteady) == len(self._failed):
            session.exitstatus = pytest.ExitCode.OK

    def _passes_alone(self, nodeid: str, number: int) -> bool:
        """Run a test in a process of its own. Where it fails, what that process printed is shown."""
        command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "", "-p", "no:cacheprovider"]
        if base := self._config.getoption("basetemp"):
            command.append(f"--basetemp={base}-alone-{number}")  # pytest empties it first
        begin = time.monotonic()
        try:
            done = subprocess.run(
                [*command, nodeid], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                cwd=self._config.rootpath, timeout=_ALONE_SECONDS,
            )  # fmt: skip
            status, printed = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            status, printed = -1, (error.stdout or b"") + b"\nIt did not end in time.\n"
        # Status 5 says that no test was found: that is not to have passed.
        passed = status == pytest.ExitCode.OK
        seconds = time.monotonic() - begin
        self._say(f"second chance, alone: {nodeid} {'passed' if passed else 'failed again'} ({seconds:.1f} s)")
        if not passed:
            self._say(printed.decode(errors="replace"))
        return passed

    def _correct_counts(self) -> None:
        """Count unsteady tests as such, in the last line that pytest writes, and not as failed."""
        stats = self._reporter.stats
        for category in _FIRST_RESULTS:
            left = [report for report in stats.pop(category, []) if report.nodeid not in self._unsteady]
            if left:
                stats[category] = left
        if self._unsteady:
            self._reporter._add_stats("unsteady", list(self._unsteady.values()))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self) -> Generator[None, object, object]:
        result = yield
        if self._unsteady:
            self._report()
        return result

    def _report(self) -> None:
        for nodeid, report in self._unsteady.items():
            self._reporter.write_sep("_", f"first failure of {nodeid}")
            self._say(report.longreprtext)
            for title, text in report.sections:
                self._reporter.write_sep("-", title)
                self._say(text)
        self._reporter.write_sep("=", "unsteady tests", yellow=True, bold=True)
        for nodeid, report in self._unsteady.items():
            self._say(f"{nodeid}: {VERDICT}")
            self._say(f"    {_first_error(report)}")
        self._say("An unsteady test is a defect, of the test or of what it tests. Mend it: docs/contributing.md#tests")

    @property
    def _reporter(self) -> Any:
        return self._config.pluginmanager.get_plugin("terminalreporter")

    def _say(self, text: str) -> None:
        self._reporter.write_line(text.rstrip("\n"))


def _first_error(report: pytest.TestReport) -> str:
    """The line that says what went wrong."""
    if crash := getattr(report.longrepr, "reprcrash", None):
        return str(crash.message).partition("\n")[0]
    return report.longreprtext.strip().rpartition("\n")[2]  # what xdist says of a crash


def pytest_configure(config: pytest.Config) -> None:
    """Only where somebody looks: not in a worker of xdist."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondChance(config), "second-chance")
