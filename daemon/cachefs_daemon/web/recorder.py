"""Records the history of the node's jobs, for the web page."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Final

from cachefs_daemon.jobs.registry import Job
from cachefs_daemon.jobs.states import JobState
from cachefs_daemon.node import Node
from cachefs_daemon.web.job_history import FIRST_PERIOD, EpochProgress, JobHistory, JobHistoryRow, SampleCount

log = logging.getLogger(__name__)

# Jobs that have a history, 14 KB each: those that began last.
MAX_JOBS: Final = 256
# Consumers of a job that are examined, 5 us each. Of more, every n-th stands for the others.
MAX_CONSUMERS: Final = 16


class _JobRecord:
    def __init__(self, job: Job) -> None:
        self.started = job.started  # another job may get its name
        self.history = JobHistory()
        self.samples = SampleCount()
        self.epoch = 0  # of the consumer that is furthest ahead
        self.is_over = False


class JobRecorder:
    """Records the progress of all jobs. Used on the event loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._records: dict[str, _JobRecord] = {}  # by name of the job, the one that began last at the end

    def history_of(self, job: Job) -> JobHistory | None:
        """Return the job's history; None where it was dropped, after many later jobs."""
        record = self._records.get(job.name)
        return record.history if record is not None and record.started == job.started else None

    async def run(self) -> None:
        """Record as long as the daemon runs."""
        while True:
            try:
                self.record_due(time.time())
            except Exception:
                log.exception("the history of jobs has a gap")
            await asyncio.sleep(FIRST_PERIOD)

    def record_due(self, now: float) -> None:
        """Add a row to each history that is due. Call every second. now: unix seconds."""
        jobs = list(self._node.jobs)[-MAX_JOBS:]
        known = {job.name for job in jobs}
        for name in [name for name in self._records if name not in known]:
            del self._records[name]
        due = [(job, record) for job in jobs if not (record := self._record_of(job)).is_over]
        due = [(job, record) for job, record in due if _is_over(job) or record.history.is_due(now)]
        if not due:
            return
        pushed = self._node.lookahead.pushers.pushed_bytes()
        for job, record in due:
            record.history.add_row(self._make_row(job, record, pushed, now))
            record.is_over = _is_over(job)

    def _record_of(self, job: Job) -> _JobRecord:
        record = self._records.get(job.name)
        if record is None or record.started != job.started:
            self._records.pop(job.name, None)
            record = self._records[job.name] = _JobRecord(job)
        return record

    def _make_row(self, job: Job, record: _JobRecord, pushed: Mapping[str, int], now: float) -> JobHistoryRow:
        consumers = list(job.consumers.values())
        every = max(1, -(-len(consumers) // MAX_CONSUMERS))
        positions = {consumer.name: EpochProgress(*consumer.progress) for consumer in consumers[::every]}
        record.samples.add_progress(positions)
        record.epoch = max([record.epoch, *(position.epoch for position in positions.values())])
        return JobHistoryRow(
            when=now,
            origin=job.fetched_bytes,
            peers=job.peer_bytes,
            pushed=sum(pushed.get(snapshot, 0) for snapshot in job.datasets),
            samples=record.samples.total * every,
            waited=self._node.jobs.stalls.waited_of_job(job.name)[1],
            epoch=record.epoch,
        )


def _is_over(job: Job) -> bool:
    return job.state != JobState.RUNNING
