"""A whole trial, step by step. It leaves no mount and no file, and no new block on the node if this user may evict."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from cachefs.errors import AccessDenied, CachefsError
from cachefs.messages import DatasetDetail, Empty, ErrorView, Selection
from cachefs.rpc import EVICT, STATUS, DaemonClient
from cachefs.trouble_texts import SEE_ERRORS
from cachefs_tools.child_programs import mount_dataset, require_fuse
from cachefs_tools.doctor import origins
from cachefs_tools.doctor.examination import origin_identity
from cachefs_tools.doctor.fact_child import FactChild, NoFacts
from cachefs_tools.origin_speed import OriginSpeed
from cachefs_tools.trial import job_process, warm
from cachefs_tools.trial.extent import FileChoice, TrialJob, TrialSample, origin_bounds
from cachefs_tools.trial.verdict import TrialFigures

_EVICTED_AT_ONCE: Final = 2000
_GRACE: Final = 20.0

ReportStep = Callable[[str, int], None]  # called with a step and its finished samples


def failure_reason(errors: Sequence[ErrorView], url: str, began: float) -> str:
    """Return the last error since *began* (Unix time) of an origin; "" if there is none."""
    prefix = f"{url.rstrip('/')}/"
    failed = [each for each in errors if each.when >= began and f"{each.subject}/".startswith(prefix)]
    return max(failed, key=lambda each: each.when).message if failed else ""


@dataclass(slots=True)
class Trial:
    """A trial of one dataset."""

    client: DaemonClient
    socket: Path
    detail: DatasetDetail
    job: TrialJob
    choice: FileChoice
    step: ReportStep
    # Steps that failed, one line each.
    remarks: list[str] = field(default_factory=list)

    def run(self) -> TrialFigures:
        """Run the trial. Raises CachefsError, OSError."""
        require_fuse()
        status = self.client.call(STATUS, Empty(), 20.0)
        self.step("measuring the origin", 0)
        origin = self._measure_origin(status.pid)
        with (
            self._restore_node(),
            tempfile.TemporaryDirectory(prefix="cachectl-bench-", ignore_cleanup_errors=True) as made,
        ):
            work = Path(made)
            dataset = self.detail.dataset
            with mount_dataset(f"{dataset.name}@{dataset.snapshot}", work / "mnt", self.socket, work / "mount.log"):
                stage = job_process.TrialEnvironment(work / "mnt", self.socket, f"bench-{dataset.name}", work)
                epochs = self._run_job(stage)
                self.step("reading cached files", 0)
                speed = self._measure_warm(work / "mnt", work)
        capacity = sum(tier.budget for tier in status.tiers)
        return TrialFigures(self.job, self.choice, origin, epochs, speed, dataset.bytes, capacity)

    def _run_job(self, stage: job_process.TrialEnvironment) -> list[job_process.TrialEpoch]:
        """Run the job. Raises CachefsError with the daemon's reason for failed reads: a program that reads files gets
        only an errno."""
        began = time.time()
        try:
            return job_process.run_job(stage, self.job, self.choice, lambda done: self.step("running the job", done))
        except CachefsError as error:
            errors = self.client.call(STATUS, Empty(), 20.0).errors
            reason = failure_reason(errors, self.detail.dataset.url, began)
            raise CachefsError(f"{error}; {reason}; {SEE_ERRORS}" if reason else str(error)) from None

    def _measure_origin(self, daemon: int) -> OriginSpeed:
        """Measure the origin like the daemon would, if its environment is visible."""
        look = origin_bounds(self.job, self.choice.mean_size)
        query = origins.OriginQuery(self.detail.dataset.name, self.detail.dataset.path, self.detail.options, look=look)
        name = origin_identity(daemon)
        child = FactChild(
            "origins", msgspec.to_builtins(query), origins.OriginFacts, look.seconds + _GRACE, name.variables,
            name.account,
        )  # fmt: skip
        try:
            facts = child.wait_for_facts()
        except NoFacts as error:
            return OriginSpeed(error="NoAnswer", message=str(error))
        return facts.speed if not facts.error else OriginSpeed(error="CachefsError", message=facts.error)

    def _measure_warm(self, mount: Path, work: Path) -> warm.WarmSpeed | None:
        try:
            return warm.measure_warm(mount, work, self.choice.samples)
        except (CachefsError, OSError) as error:
            self.remarks.append(f"warm reads were not measured: {error}")
            return None

    @contextlib.contextmanager
    def _restore_node(self) -> Iterator[None]:
        """At the end, evict what was not on the node before."""
        try:
            yield
        finally:
            self.step("cleaning up", 0)
            try:
                for start in range(0, len(self.choice.cold_samples), _EVICTED_AT_ONCE):
                    self._evict(self.choice.cold_samples[start : start + _EVICTED_AT_ONCE])
            except AccessDenied:
                self.remarks.append("what was fetched stays on the node: only administrators may evict it")
            except CachefsError as error:
                self.remarks.append(f"what was fetched stays on the node: {error}")

    def _evict(self, samples: Sequence[TrialSample]) -> None:
        paths = [sample.path for sample in samples]
        self.client.call(EVICT, Selection(dataset=self.detail.dataset.name, paths=paths), 60.0)
